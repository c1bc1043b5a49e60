"""Discovered rules: what they should be, and what must never be proposed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autopar.errors import ConfigurationError
from autopar.rules.child_process import run_in_child
from autopar.rules.discovery import discover


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    torch.manual_seed(0)


@torch.library.custom_op("autopar_test::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("autopar_test::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    if x.shape[0] != 6:
        os.kill(os.getpid(), signal.SIGSEGV)
    return 2 * x


@torch.library.custom_op("autopar_test::writes", mutates_args={"x"})
def writes(x: Tensor) -> None:
    x.add_(1)


def r(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("aten::mm", lambda: (r(6, 12), r(12, 18)), "a b, b c -> a c ; linear: x - | - x"),
        ("aten::bmm", lambda: (r(6, 12, 4), r(6, 4, 8)), "a b c, a c e -> a b e ; linear: x - | - x"),
        ("aten::relu", lambda: (r(6, 12),), "a b -> a b"),
        ("aten::add.Tensor", lambda: (r(6, 12), r(12)), "a b, b -> a b ; linear: x x"),
        ("aten::amax", lambda: (r(6, 12), [1]), "a b -> a ; b: max"),
        ("aten::sum.dim_IntList", lambda: (r(6, 12), [0]), "a b -> b ; linear: x"),
        ("aten::_softmax", lambda: (r(6, 12), 1, False), "a _ -> a _"),
        ("aten::cumsum", lambda: (r(6, 12), 0), "_ a -> _ a ; linear: x"),
        ("aten::sort", lambda: (r(6, 12), 0), "_ a -> _ a, _ a"),
    ],
)
def test_known_rules_are_found(name: str, arguments, expected: str) -> None:  # type: ignore[no-untyped-def]
    assert discover(name, arguments()).rule == expected


def test_a_contraction_behind_a_relu_is_not_proposed() -> None:
    @torch.library.custom_op("autopar_test::mm_relu", mutates_args=())
    def mm_relu(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).relu()

    found = discover("autopar_test::mm_relu", (r(6, 12), r(12, 18)))
    assert found.rule == "a _, _ b -> a b"


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("aten::bernoulli.p", lambda: (r(6, 6), 0.5), "random"),
        ("autopar_test::noisy", lambda: (r(6, 6),), "another result each time"),
        ("autopar_test::writes", lambda: (r(6, 6),), "changes its operands"),
        ("aten::nonzero", lambda: (r(6, 6),), "depend on data"),
        ("aten::relu", lambda: (torch.ones(6, 6),), "distinct"),
        ("aten::relu", lambda: (torch.rand(6, 6) + 1,), "one sign"),
        ("aten::mm", lambda: (r(6, 12), r(6, 12)), "does not run"),
    ],
)
def test_what_cannot_be_tried_is_refused(name: str, arguments, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=reason):
        discover(name, arguments())


def test_a_crash_costs_its_trial_only() -> None:
    found = discover("autopar_test::fragile", (r(6, 12),))
    assert found.crashes == 1
    assert found.rule == "_ a -> _ a ; linear: x"


def test_results_are_cached() -> None:
    first = discover("aten::relu", (r(6, 12),))
    assert discover("aten::relu", (r(6, 12),)) == first
    assert discover("aten::relu", (r(6, 12),), use_cache=False) == first


def test_a_child_goes_on_behind_a_crash() -> None:
    def trial(index: int) -> int:
        if index == 1:
            os.abort()
        return index * index

    assert run_in_child(trial, 4) == ([0, None, 4, 9], 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mm", "a b, b c -> a c ; linear: x - | - x"),
        ("aten::bmm", "a b c, a c e -> a b e ; linear: x - | - x"),
        ("aten::relu", "a b -> a b"),
        ("aten::mv", "a b, b -> a ; linear: x - | - x"),
    ],
)
def test_an_example_is_made_up(name: str, expected: str) -> None:
    assert discover(name).rule == expected


def test_an_operator_that_takes_what_nobody_can_make_up_asks_for_an_example() -> None:
    with pytest.raises(ConfigurationError, match="give an example"):
        discover("aten::gather")
