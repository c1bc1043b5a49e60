"""Gradients of a compiled model on one process: the plain model's, or an error with the next step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar

X, Y = torch.linspace(-1.0, 1.0, 48).view(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])


class Judged(nn.Module):
    """forward(x (B, 8), y (B,)) -> a loss, a further one of a layer of its own, the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.beside = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits, y), self.beside(hidden).pow(2).mean(), logits


class Penalised(nn.Module):
    """A gradient penalty inside of forward(x (B, 8)) -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = self.critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (slope.norm(dim=1) - 1.0).pow(2).mean()


@pytest.fixture(scope="module")
def pair() -> tuple[autopar.ParallelModule, Judged]:
    torch.manual_seed(0)
    model = Judged()
    reference = copy.deepcopy(model)
    return autopar.compile(model, (X, Y), mode="fast"), reference


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_equal_gradients(module: nn.Module, reference: nn.Module) -> None:
    mine, plain = gradients(module), gradients(reference)
    assert {n for n in mine if mine[n] is None} == {n for n in plain if plain[n] is None}
    for name, gradient in plain.items():
        if gradient is not None:
            torch.testing.assert_close(mine[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_parameter_that_no_loss_reaches_keeps_none(pair: tuple[nn.Module, nn.Module]) -> None:
    for index in (0, 1):
        for module in pair:
            module.zero_grad()
            module(X, Y)[index].backward()
        assert_equal_gradients(*pair)


def test_further_losses_are_plain_and_logits_are_attached(pair: tuple[nn.Module, nn.Module]) -> None:
    loss, further, logits = pair[0](X, Y)
    assert (type(loss), type(further)) == (Tensor, Tensor)
    assert logits.requires_grad
    with pytest.raises(autopar.GradientError, match=r"the output 2, but .* differentiable=\['2'\]"):
        (loss + pair[0].full(logits).sum()).backward()


def test_outputs_are_named_as_a_whole_or_not_at_all() -> None:
    with pytest.raises(autopar.ConfigurationError, match=r"differentiable names \['logits'\]"):
        autopar.compile(Judged(), (X, Y), mode="fast", differentiable=["logits"])


def test_an_input_wants_its_gradient_at_any_call(pair: tuple[nn.Module, nn.Module]) -> None:
    found = []
    for module in pair:
        x = X.clone().requires_grad_()
        module.zero_grad()
        module(x, Y)[0].backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1])
    assert_equal_gradients(*pair)


def test_weights_that_change_are_named(pair: tuple[nn.Module, nn.Module]) -> None:
    module, _ = pair
    module.zero_grad()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    first, second = module(X, Y)[0], module(X, Y)[0]
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"head\.weight changed between forward and backward"):
        second.backward()


def test_an_input_with_the_name_of_a_parameter_gets_no_gradient() -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, weight: Tensor) -> Tensor:
            return (self.weight * weight).sum()

    with pytest.raises(autopar.CaptureError, match="the input weight wants a gradient"):
        autopar.compile(Clash(), {"weight": X.clone().requires_grad_()}, mode="fast")


def test_a_gradient_penalty_belongs_into_forward() -> None:
    torch.manual_seed(0)
    model = Penalised()
    reference = copy.deepcopy(model)
    module = autopar.compile(model, (X,), mode="fast")
    for each in (module, reference):
        each(X).backward()
    assert_equal_gradients(module, reference)
