"""Python values are spelled alike where they are equal, and changes inside of them are seen."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from autopar.capture.python_values import Watch, code_digest, is_of_user


class Mode(enum.Enum):
    """Two words."""

    FAST = 1
    SLOW = 2


class Settings:
    """An object of the user's, which may hold itself."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.me = self


def scaled(x: float, by: float = 2.0) -> float:
    return x * by


MAKERS: dict[str, Callable[[], Any]] = {
    "nested": lambda: {"a": [1, 2.5, ("x", None)], "b": {3, 4}},
    "settings": lambda: Settings(1.5),
    "namespace": lambda: types.SimpleNamespace(k=[1]),
    "tensor": lambda: torch.arange(4.0),
    "half": lambda: torch.ones((), dtype=torch.bfloat16),
    "partial": lambda: functools.partial(scaled, by=3.0),
    "function": lambda: lambda x: x * 2,
    "enum": lambda: [Mode.FAST, torch.float32, numpy.float64(1.5)],
}


@pytest.mark.parametrize("name", MAKERS)
def test_equal_values_are_spelled_alike_and_without_addresses(name: str) -> None:
    one, other = (Watch().spelled(MAKERS[name]()) for _ in range(2))
    assert one == other
    assert " at 0x" not in one


DIFFERENT = {
    "number": (1, 2),
    "type": (1, 1.0),
    "truth": (1, True),
    "word": ("a", "b"),
    "absent": (None, "None"),
    "order": ([1, 2], [2, 1]),
    "key": ({"a": 1}, {"b": 1}),
    "enum": (Mode.FAST, Mode.SLOW),
    "tensor": (torch.zeros(2), torch.ones(2)),
    "settings": (Settings(1.0), Settings(2.0)),
    "code": (lambda x: x * 2, lambda x: x * 3),
    "partial": (functools.partial(scaled, by=1.0), functools.partial(scaled, by=2.0)),
    "builtin": (torch.relu, torch.tanh),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_values_are_spelled_apart(name: str) -> None:
    one, other = DIFFERENT[name]
    assert Watch().spelled(one) != Watch().spelled(other)


CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "list": ([1, 2], lambda v: v.append(3)),
    "empty list": ([], lambda v: v.append(3)),
    "entry": ({"a": {"b": 1}}, lambda v: v["a"].update(b=2)),
    "tensor": (torch.zeros(2), lambda v: v.add_(1)),
    "attribute": (Settings(1.0), lambda v: setattr(v, "alpha", 2.0)),
    "new attribute": (Settings(1.0), lambda v: setattr(v, "beta", 2.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_inside_are_seen(name: str) -> None:
    value, change = CHANGES[name]
    watch = Watch()
    before = watch.spelled(value)
    assert watch.unchanged()
    change(value)
    assert not watch.unchanged()
    assert Watch().spelled(value) != before


def test_what_changed_is_put_back() -> None:
    variables: dict[str, Any] = {"count": 0, "seen": [], "table": {"a": 1}, "kinds": {1}}
    watch = Watch()
    for name in (*variables, "new"):
        watch.spelled(watch.slot(variables, name))
    seen = variables["seen"]
    variables["count"] = 5
    variables["new"] = 1
    seen.append(3)
    variables["table"]["b"] = 2
    variables["kinds"].clear()
    watch.put_back()
    assert variables == {"count": 0, "seen": [], "table": {"a": 1}, "kinds": {1}}
    assert variables["seen"] is seen
    assert watch.unchanged()


def test_code_is_told_apart_by_what_it_does_not_by_its_line() -> None:
    texts = ["def f(x):\n  return [y * 2 for y in x]", "\n\n\ndef f(x):\n  return [y * 2 for y in x]"]
    codes = []
    for text in texts:
        found: dict[str, Any] = {}
        exec(compile(text, "file", "exec"), found)
        codes.append(found["f"].__code__)
    assert code_digest(codes[0]) == code_digest(codes[1])


@pytest.mark.parametrize(
    ("place", "beside", "expected"),
    [
        ("project/{}/layers.py", "project/{}.egg-info", True),
        ("target/{}/layers.py", "target/{}-1.0.dist-info", False),
        ("lib/site-packages/{}/layers.py", "lib/site-packages/other", False),
    ],
)
def test_what_pip_installed_is_not_the_users_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, beside: str, expected: bool
) -> None:
    name = f"package_{expected}_{len(place)}"
    (tmp_path / beside.format(name)).mkdir(parents=True)
    module = types.ModuleType(f"{name}.layers")
    module.__file__ = str(tmp_path / place.format(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert is_of_user(module.__name__) is expected


def test_a_generated_module_whose_name_is_longer_than_its_path_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_geometric makes such modules of its templates."""
    module = types.ModuleType("generated.of.a.template.with.a.long.name")
    module.__file__ = "/short.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert is_of_user(module.__name__)
