"""What a framework is handed in place of its model, on one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.integrations.prepared_module import compiled_in, is_planned, prepared, trainer_of, when_planned


class _Scores(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


class _WithLoss(_Scores):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # a model with labels
        scores = super().forward(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


X, Y = torch.randn(6, 4), torch.arange(6) % 3


def test_a_model_without_a_loss_is_trained_by_one_outside() -> None:
    model = _Scores()
    weight = model.weight.detach().clone().requires_grad_()
    bias = model.bias.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = prepared(model, optimizer, {})
    assert not is_planned(module)
    scores = module(X)
    assert type(scores) is Tensor
    nn.functional.cross_entropy(scores, Y).backward()
    optimizer.step()
    nn.functional.cross_entropy(nn.functional.linear(X, weight, bias), Y).backward()
    assert weight.grad is not None
    torch.testing.assert_close(module.state_dict()["weight"], (weight - 0.1 * weight.grad).detach())


def test_outputs_beside_a_loss_are_plain() -> None:
    module = prepared(_WithLoss(), None, {}, {"x": X, "labels": Y})
    out = module(x=X, labels=Y)
    assert type(out["loss"]) is Tensor
    assert type(out["scores"]) is Tensor


def test_an_example_plans_where_forward_takes_it() -> None:
    assert is_planned(prepared(_WithLoss(), None, {}, {"x": X, "labels": Y}))
    assert not is_planned(prepared(_WithLoss(), None, {}, {"pixels": X}))
    assert not is_planned(prepared(_WithLoss(), None, {}, (X, Y)))
    module = prepared(_WithLoss(), None, {}, {"x": X, "labels": Y})
    assert prepared(module, None, {}) is module


def test_a_first_call_in_evaluation_plans_for_training() -> None:
    model = _WithLoss()
    module = prepared(model, torch.optim.SGD(model.parameters(), lr=0.1), {})
    module.eval()
    with torch.inference_mode():
        module(x=X, labels=Y)
    assert not module.training
    module.train()
    module(x=X, labels=Y)["loss"].backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_what_waits_for_the_plan_is_done_once() -> None:
    module, done = prepared(_Scores(), None, {}), []
    when_planned(module, lambda: done.append(1))
    assert done == []
    module(X)
    module(X)
    assert done == [1]
    when_planned(module, lambda: done.append(2))
    assert done == [1, 2]


def test_the_compiled_module_and_its_optimizer_are_found() -> None:
    model = _Scores()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(_Scores().parameters(), lr=0.1)
    module = prepared(model, optimizer, {})
    for _ in range(2):
        assert trainer_of(module, [other, optimizer]) is optimizer
        assert trainer_of(module, [other]) is None
        module(X)
    wrapper = nn.Module()
    wrapper.module = module
    assert compiled_in(wrapper) is module
    assert compiled_in(nn.Linear(2, 2)) is None
