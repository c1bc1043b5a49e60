"""Code that decides by values is captured along the way of the example, and what Python read is guarded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.program import Asked
from tests.capture.branching_models import SIZE, Wav2Vec2, examples
from tests.capture.execute import eager_step, worst_gradient_error

EXAMPLES = examples()
READS = {
    "detr": [("if self.training and not torch.isfinite(hidden).all():", True)],
    "wav2vec2": [("torch.rand(1).item() <=", float)] * 2 + [("drawn < self.layer_drop", False)] * 2,
    "conformer": [("int(torch.max(lengths).item())", 5)],
    "graph": [("edge_index[:, mask]", 6)],
}


def compiled(model: nn.Module, inputs: dict[str, Any]) -> autopar.ParallelModule:
    return autopar.compile(model, inputs, branches="example")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_four_codes_train_and_are_guarded(name: str) -> None:
    model, inputs, other = EXAMPLES[name]
    expected = eager_step(model, (), inputs)
    state = torch.get_rng_state()
    module = compiled(model, inputs)
    assert torch.equal(state, torch.get_rng_state())
    loss = module(**inputs)
    loss.backward()
    assert torch.allclose(loss, expected[0])
    assert worst_gradient_error({n: p.grad for n, p in module.named_parameters()}, expected[1]) < 1e-6
    guards = module.step_for((), inputs)[0].program.guards
    assert [
        (words in guard.place, type(guard.value)) for guard, (words, _) in zip(guards, READS[name], strict=True)
    ] == [(True, value if isinstance(value, type) else type(value)) for _, value in READS[name]]
    for guard, (words, value) in zip(guards, READS[name], strict=True):
        if other:
            with pytest.raises(autopar.BranchError) as raised:
                module(**other)
            assert words in str(raised.value)
            assert f"read {value}, " in str(raised.value)
        else:
            assert guard.is_drawn
    assert torch.equal(module(**inputs), loss)  # what was refused left nothing behind
    if name == "conformer":  # captured without weights, with what the capture before read
        assert torch.allclose(module.eval()(**inputs), model.eval()(**inputs))


def test_without_the_option_the_refusal_names_it() -> None:
    for name in ("detr", "graph"):
        model, inputs, _ = examples()[name]
        with pytest.raises(autopar.CaptureError, match='branches="example"'):
            autopar.plan(model, inputs, cluster="2 cpu")


def test_a_layer_that_is_dropped_at_random_raises_when_the_draw_turns(caplog: pytest.LogCaptureFixture) -> None:
    _, inputs, _ = EXAMPLES["wav2vec2"]
    with caplog.at_level(logging.WARNING):
        torch.manual_seed(0)
        module = compiled(Wav2Vec2(layer_drop=0.5), inputs)
    assert "a random draw decides at" in caplog.text

    def train() -> None:
        for _ in range(64):
            module(**inputs)

    with pytest.raises(autopar.BranchError, match=r"layer_drop.*A random draw decides there"):
        train()


class Model(nn.Module):
    """A linear layer, and a forward that a test writes."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self._forward = nn.Linear(SIZE, SIZE), forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def numbers(model: nn.Module, x: Tensor) -> Tensor:
    first, high = x[0, 0].item(), x.max().item()
    if first > 0 and not first > 3:
        x = x + torch.full((SIZE,), 2.0)
    return model.linear(x).sum() * (high if high > 0 else 1.0)  # type: ignore[operator, no-any-return]


def lists(model: nn.Module, x: Tensor) -> Tensor:
    counts = (x > 0).sum(1).tolist()
    return model.linear(x).mean() * counts[0] if 3 in x.round() else x.sum()  # type: ignore[operator, no-any-return]


def rows(model: nn.Module, x: Tensor) -> Tensor:
    y = model.linear(x) * 1.0  # type: ignore[operator]
    where = torch.nonzero(x[:, 0] > 0, as_tuple=True)[0]
    y[x[:, 1] > 0] = y[x[:, 1] > 0] * 2
    return y[where].mean() + y[y > 0.5].sum()  # type: ignore[no-any-return]


def sizes(model: nn.Module, x: Tensor) -> Tensor:
    """Tensors of one element where torch takes a number: a class count, a size, the end of a slice, a factor."""
    high = x.max().long()
    classes = functional.one_hot((x[:, 0] > 0).long(), max(high, 2))[..., :SIZE]
    filled = torch.full((high, SIZE), high).add(torch.zeros(high).unsqueeze(1), alpha=high)
    kept = model.linear(x)[:, :high]  # type: ignore[operator]
    counted = functional.one_hot(x[:, 1].relu().long()).sum(0)[-1]
    return counted * kept.mean() * classes.sum() + (filled * torch.arange(high).view(high, 1)).sum()  # type: ignore[no-any-return]


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        y = model.linear(x)  # type: ignore[operator]
        return y.tanh() if y.isfinite().all() else y  # type: ignore[no-any-return]

    return checkpoint(block, x, use_reentrant=False).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "changed", "words"),
    [
        (numbers, (0, 0, -1.0), "on the other side of 0"),
        (lists, (0, slice(None), 3.0), "lists"),
        (rows, (0, 0, -1.0), "rows"),
        (sizes, (1, 1, 7.0), "sizes"),
        (checkpointed, (0, 0, float("nan")), "read True, False now"),
    ],
)
def test_what_python_reads_is_what_every_call_must_give(
    forward: Callable[[nn.Module, Tensor], Tensor], changed: Any, words: str
) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, SIZE)
    x[0, 0], x[1, 0], x[1, 1] = 2.0, 3.0, 9.0
    model = Model(forward)
    expected = eager_step(model, (x,), {})
    module = compiled(model, {"x": x})
    loss = module(x)
    loss.backward()
    assert torch.allclose(loss, expected[0])
    assert worst_gradient_error({n: p.grad for n, p in module.named_parameters()}, expected[1]) < 1e-6
    other = x.clone()
    other[changed[:2]] = changed[2]
    with pytest.raises(
        autopar.BranchError, match=words if words.startswith(("on", "read")) else "takes another branch"
    ):
        module(other)
    if forward is numbers:
        guards = module.step_for((x,), {})[0].program.guards
        assert [guard.asked for guard in guards] == [(Asked("gt", 0, True), Asked("gt", 3, False)), ()]
        nearly = x.clone()
        nearly[0, 0] = 1.0
        assert torch.isfinite(module(nearly))  # answers alike


def drawn_number(model: nn.Module, x: Tensor) -> Tensor:
    return model.linear(x).sum() * torch.rand(1).item()  # type: ignore[operator, no-any-return]


def test_what_has_no_value_is_refused_by_its_line() -> None:
    model, inputs, _ = examples()["detr"]
    with pytest.raises(autopar.CaptureError, match=r"if self.training and not torch.isfinite.*not on meta"):
        autopar.plan(model.to("meta"), inputs, cluster="2 cpu", branches="example")
    conformer, inputs, _ = examples()["conformer"]  # its branch depends on inputs alone
    found = autopar.plan(conformer.to("meta"), inputs, cluster="2 cpu", branches="example")
    assert found.question["branches"] == "example"
    with pytest.raises(autopar.CaptureError, match=r"drawn_number|reads a random number into Python"):
        autopar.plan(Model(drawn_number), torch.randn(4, SIZE), cluster="2 cpu", branches="example")
    with pytest.raises(autopar.ConfigurationError, match=r'write "example"'):
        autopar.plan(conformer, inputs, cluster="2 cpu", branches="first")  # type: ignore[arg-type]
