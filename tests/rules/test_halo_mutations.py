"""Broken local forms of spatial operators: the proof by execution sees every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx

from autopar.layouts.placement import Mesh
from autopar.ops import halo as ops
from autopar.passes.implementations.local_context import LocalContext
from autopar.rules.engine import rule_for
from autopar.rules.windows import Window
from tests.rules import cases_pooling, cases_spatial
from tests.rules.execution import capture_call, check_split

HALOS = [
    "aten.convolution.default/halo_rows",
    "aten.convolution_backward.default/halo_strided_wide",
    "aten.convolution.default/halo_causal",
]
POOLS = ["aten.max_pool2d_with_indices.default/overlapping", "aten.max_pool2d_with_indices_backward.default/same"]
NORMS = [
    "aten.native_group_norm.default/rows",
    "aten.native_group_norm_backward.default/rows",
    "aten._native_batch_norm_legit_functional.default/rows",
    "aten.native_batch_norm_backward.default/rows",
]


def is_correct(name: str, extent: int = 3) -> bool:
    """Whether the first split with an implementation of a case equals the plain operator."""
    case = next(case for case in (*cases_pooling.CASES, *cases_spatial.CASES) if case.name == name)
    torch.manual_seed(0)
    captured = capture_call(case.target, case.build(12), case.kwargs)
    rule = rule_for(captured.node)
    assert rule is not None
    split = "d0" if "norm" in name else "s0"
    assert split in rule.implementations
    try:
        check_split(captured, rule, (split,), Mesh(("tp",), (extent,)))
    except (AssertionError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("name", [*HALOS, *POOLS, *NORMS])
def test_unbroken_forms_are_correct(name: str) -> None:
    assert is_correct(name)


@pytest.mark.parametrize("name", [*HALOS, *POOLS])
def test_a_window_that_begins_one_row_late_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Window.rows

    def late(window: Window, start: int, length: int) -> tuple[int, int]:
        first, count = rows(window, start, length)
        return first + 1, count

    monkeypatch.setattr(Window, "rows", late)
    assert not is_correct(name)


@pytest.mark.parametrize("name", [*HALOS, *POOLS])
def test_a_halo_that_is_one_row_short_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros stand where the last borrowed row should be."""
    edges = ops.edges

    def short(x: Tensor, dim: int, runs: Any) -> Tensor:
        rows = edges(x, dim, runs)
        rows[-1:] = 0
        return rows

    monkeypatch.setattr("autopar.ops.halo.edges", short)
    assert not is_correct(name)


@pytest.mark.parametrize("name", HALOS)
def test_padding_at_the_wrong_side_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extended = ops.extended

    def swapped(x: Tensor, borrowed: Any, dim: int, num_before: int, own: Any, fill: Any, value: float) -> Tensor:
        return extended(x, borrowed, dim, num_before, own, (fill[1], fill[0]), value)

    monkeypatch.setattr("autopar.ops.halo.extended", swapped)
    assert not is_correct(name)


@pytest.mark.parametrize("name", [HALOS[1], POOLS[1]])
def test_gradients_that_stay_with_the_borrower_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = ops.folded

    def kept(gradient: Tensor, returned: Tensor | None, *rest: Any) -> Tensor:
        return folded(gradient, None if returned is None else torch.zeros_like(returned), *rest)

    monkeypatch.setattr("autopar.ops.halo.folded", kept)
    assert not is_correct(name)


@pytest.mark.parametrize("name", POOLS)
def test_positions_that_count_in_the_block_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = cast(Callable[..., Tensor], ops.moved_positions)
    monkeypatch.setattr(
        "autopar.ops.halo.moved_positions", lambda p, size, start, new: moved(p, size, [0] * len(start), new)
    )
    assert not is_correct(name)


@pytest.mark.parametrize("name", NORMS)
def test_statistics_that_are_not_synchronised_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def local(self: LocalContext, value: fx.Node, axes: tuple[int, ...], op: str = "sum") -> fx.Node:
        return value

    monkeypatch.setattr(LocalContext, "all_reduce", local)
    assert not is_correct(name)
