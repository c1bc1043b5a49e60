"""A capture says what its forward read, and a state notices when that is another value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import PythonState, capture, differences

X = torch.randn(4, 8)
SCALE = 1.0
SETTINGS = {"shift": 0.0}
COUNT = 0


def by_scale(hidden: Tensor) -> Tensor:
    return hidden * SCALE + SETTINGS["shift"]


class Model(nn.Module):
    """Reads attributes, a class attribute, globals by a helper, and a tensor that is no buffer."""

    beta = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0)
        self.alpha: Any = 1.0
        self.unread = 0
        self.table = torch.ones(8)
        self.act: Any = functional.relu

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.drop(self.linear(x))) * self.alpha * self.beta * self.table
        if getattr(self, "shifted", False):
            hidden = hidden + 1
        return by_scale(hidden).pow(2).mean()


@pytest.fixture(scope="module")
def reads() -> frozenset[tuple[str, str]]:
    return capture(Model(), (X,)).reads


CHANGES: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "attribute": (lambda model, patch: setattr(model, "alpha", 2.0), "alpha is float:2.0, was float:1.0"),
    "of a submodule": (lambda model, patch: setattr(model.drop, "p", 0.5), "drop.p is float:0.5, was float:0.0"),
    "class attribute": (lambda model, patch: patch.setattr(Model, "beta", 3.0), "Model.beta is float:3.0"),
    "over the class": (lambda model, patch: setattr(model, "beta", 3.0), "beta is float:3.0, was absent"),
    "absent before": (lambda model, patch: setattr(model, "shifted", True), "shifted is bool:True, was absent"),
    "global": (lambda model, patch: patch.setitem(globals(), "SCALE", 2.0), f"SCALE of {__name__} is float:2.0"),
    "in a global": (lambda model, patch: patch.setitem(SETTINGS, "shift", 1.0), f"SETTINGS of {__name__} is dict("),
    "function": (lambda model, patch: setattr(model, "act", torch.tanh), "act is _VariableFunctionsClass.tanh<"),
    "forward": (lambda model, patch: patch.setattr(Model, "forward", lambda self, x: x.mean()), "Model.forward is"),
    "tensor": (lambda model, patch: model.table.fill_(2.0), "table is tensor"),
    "other tensor": (lambda model, patch: setattr(model, "table", torch.zeros(8)), "table is tensor"),
    "hook": (lambda model, patch: model.linear.register_forward_hook(lambda *_: None), "forward_hooks of linear is"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_forward_read_counts(name: str, reads: frozenset[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = CHANGES[name]
    model = Model()
    state = PythonState(model, reads)
    before, digest = state.texts, state.digest()
    assert state.unchanged()
    change(model, monkeypatch)
    assert state.digest() != digest
    assert any(text.startswith(words) for text in differences(before, state.texts)), differences(before, state.texts)


def test_what_forward_did_not_read_counts_for_nothing(reads: frozenset[Any]) -> None:
    model = Model()
    state = PythonState(model, reads)
    model.unread = 7
    model.linear.weight.data.add_(1)
    assert state.unchanged()


def test_equal_models_are_in_equal_states(reads: frozenset[Any]) -> None:
    torch.manual_seed(0)
    model = Model()
    assert PythonState(model, reads).texts == PythonState(copy.deepcopy(model), reads).texts


def test_an_equal_value_is_the_same_state(reads: frozenset[Any]) -> None:
    model = Model()
    state = PythonState(model, reads)
    digest = state.digest()
    model.alpha = float("1.0")
    assert state.digest() == digest


def test_closures_and_modules_of_a_loss_function_count(reads: frozenset[Any]) -> None:
    def make(weight: float) -> Callable[[Tensor, Any], Tensor]:
        return lambda output, batch: output * weight

    model = Model()
    assert differences(
        PythonState(model, reads, make(1.0)).texts, PythonState(model, reads, make(2.0)).texts
    ) == [f"weight in {make.__qualname__}.<locals>.<lambda> is float:2.0, was float:1.0"]
    criterion = nn.CrossEntropyLoss()
    state = PythonState(model, reads, criterion)
    digest = state.digest()
    criterion.label_smoothing = 0.5
    assert state.digest() != digest


def test_capture_leaves_globals_and_lists_of_hooks_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            global COUNT
            COUNT += 1
            return super().forward(x).mean()

    seen: list[Tensor] = []
    model = Counting(8, 8)
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    capture(model, (X,))
    assert (COUNT, seen) == (0, [])
    assert f"COUNT of {__name__} is int:1, was int:0" in caplog.text
    assert "seen of" in caplog.text or "seen in" in caplog.text
