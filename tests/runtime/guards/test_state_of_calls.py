"""A compiled module follows the Python state of its model: parity with the plain one after each change."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.guards.state_of_calls import MANY, StateOfCalls
from autopar.runtime.parallel_module import ParallelModule

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
SCALE = 1.0


class Knob:
    """A closure over a number."""

    def __init__(self) -> None:
        turn = 1.0

        def apply(hidden: Tensor) -> Tensor:
            return hidden * turn

        def set_to(value: float) -> None:
            nonlocal turn
            turn = value

        self.apply, self.set_to = apply, set_to


KNOB = Knob()


class Model(nn.Module):
    """forward(x (B, 8)) -> scalar; its names are those of attributes of a compiled module."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.mesh = nn.Dropout(0.0)
        self.precision = nn.Parameter(torch.ones(8))
        self.loss_fn = nn.MSELoss()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("base_seed", torch.ones(()))
        self.turn = KNOB.apply
        self.alpha = 1.0
        self.step = 0
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.turn(self.mesh(self.norm(self.plan(x)))) * self.alpha * self.precision * SCALE
        return self.loss_fn(hidden + self.calls * 0.1 * self.base_seed, x)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _hooked(modules: list[Any]) -> list[Any]:
    return [module.norm.register_forward_hook(double) for module in modules]


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "alpha": lambda modules: [setattr(module, "alpha", 2.0) for module in modules],
    "dropout": lambda modules: [setattr(module.get_submodule("mesh"), "p", 1.0) for module in modules],
    "global": lambda modules: globals().update(SCALE=2.0),
    "closure": lambda modules: KNOB.set_to(3.0),
    "hook added": _hooked,
    "submodule in eval mode": lambda modules: [module.norm.eval() for module in modules],
}


def errors(module: Any, model: Any) -> float:
    """Largest difference of loss and gradients after a step of both."""
    for each in (module, model):
        each.zero_grad()
    loss, expected = module(X), model(X)
    loss.backward()
    expected.backward()
    found = [float((loss - expected).detach().abs())]
    plain = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        found.append(float((parameter.grad - plain[name].grad).abs().max()))
    return max(found)


@pytest.fixture
def pair() -> tuple[ParallelModule, Model]:
    _put_back()
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    return autopar.compile(model, X, mode="fast"), reference


def test_every_change_is_followed_and_known_states_are_captured_once(pair: tuple[Any, Any]) -> None:
    module, model = pair
    both = [module, model]
    assert errors(module, model) < 1e-6
    for attribute, values in (("alpha", (2.0, 1.0, 2.0, 1.0)), ("step", (1, 2))):
        for value in values:
            for each in both:
                setattr(each, attribute, value)
            assert errors(module, model) < 1e-6
    assert module.original.step == 2
    assert len(module._steps) == 2, "alpha took two values, and nothing reads step"
    handles = _hooked(both)
    assert errors(module, model) < 1e-6
    for handle in handles:
        handle.remove()
    assert errors(module, model) < 1e-6
    assert len(module._steps) == 3
    for change in ("global", "closure", "dropout", "submodule in eval mode"):
        CHANGES[change](both)
        assert errors(module, model) < 1e-6, change
    module.norm, model.norm = nn.Identity(), nn.Identity()
    with pytest.raises(autopar.ConfigurationError, match=r"norm\.\w+ was removed after autopar.compile"):
        module(X)


@pytest.mark.parametrize("change", ["alpha", "dropout", "global", "closure", "hook added"])
def test_without_the_state_in_the_key_the_old_graph_runs(change: str, shared: tuple[Any, Any]) -> None:
    module, model = shared
    with mock.patch.object(StateOfCalls, "digest", return_value=""):
        assert errors(module, model) < 1e-6
        before = len(module._steps)
        handles = CHANGES[change]([module, model])
        assert errors(module, model) > 1e-3
        assert len(module._steps) == before
    if change == "hook added":
        for handle in handles:
            handle.remove()
    _put_back(module, model)


@pytest.fixture(scope="module")
def shared() -> tuple[ParallelModule, Model]:
    _put_back()
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    return autopar.compile(model, X, mode="fast"), reference


def _put_back(*modules: Any) -> None:
    for module in modules:
        module.alpha = 1.0
        module.get_submodule("mesh").p = 0.0
    globals().update(SCALE=1.0)
    KNOB.set_to(1.0)


def test_a_value_that_changes_often_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    states = StateOfCalls(model, None)
    with caplog.at_level(logging.WARNING, logger="autopar"):
        for step in range(MANY + 3):
            model.alpha = float(step)
            states.captured("kind", {("", "alpha")})
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"{MANY + 1} graphs for the same inputs" in message
    assert "alpha is float:8.0, was float:7.0" in message


def test_digests_name_values_and_kinds_are_apart() -> None:
    model = Model()
    states = StateOfCalls(model, None)
    assert states.digest("never captured") == ""
    states.captured("train", {("", "alpha")})
    states.captured("eval", {("", "step")})
    train, evaluation = states.digest("train"), states.digest("eval")
    model.alpha = 5.0
    assert states.digest("train") != train
    assert states.digest("eval") == evaluation
    assert states.texts("train")["alpha"] == "float:5.0"


def test_a_version_counts_the_states_met_and_names_what_differs() -> None:
    model = Model()
    states = StateOfCalls(model, None)
    assert states.version() == ""
    states.captured("train", {("", "alpha")})
    assert states.version() == "1 (as it was captured)"
    model.alpha = 5.0
    assert states.version() == "2 (alpha)"
    model.alpha = 1.0
    assert states.version() == "1 (as it was captured)"
