"""Broken running sums along a split dim: the proof by execution sees every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.layouts.placement import Mesh
from autopar.ops import prefix_sums
from autopar.rules.engine import rule_for
from autopar.rules.rule import Rule
from tests.rules.execution import Captured, capture_call, check_split

MESHES = {"uneven": (Mesh(("tp",), (3,)), ("d0",)), "two_axes": (Mesh(("dp", "tp"), (2, 2)), ("d0", "d0"))}


SUMS = (torch.ops.aten.cumsum.default, torch.ops.autopar.reverse_cumsum.default)


def captured_with_rule(target: Any) -> tuple[Captured, Rule]:
    torch.manual_seed(1)
    captured = capture_call(target, (torch.randn(7, 3), 0), {})
    rule = rule_for(captured.node)
    assert rule is not None
    return captured, rule


def own_block_too(total: Tensor, position: int, num_blocks: int) -> Tensor:
    return _after_block(total, position - 1, num_blocks)


def blocks_in_reverse(total: Tensor, position: int, num_blocks: int) -> Tensor:
    return _after_block(total, position, num_blocks).flip(0)


_after_block = prefix_sums.after_block


@pytest.mark.parametrize("target", SUMS, ids=str)
@pytest.mark.parametrize("mesh", MESHES)
def test_running_sums_continue_over_blocks(mesh: str, target: Any) -> None:
    captured, rule = captured_with_rule(target)
    check_split(captured, rule, MESHES[mesh][1], MESHES[mesh][0])
    assert rule.needs_one_range("d0")


@pytest.mark.parametrize("target", SUMS, ids=str)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("broken", [own_block_too, blocks_in_reverse])
def test_wrong_totals_before_a_block_are_caught(
    broken: Callable[[Tensor, int, int], Tensor], mesh: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_sums, "after_block", broken)
    captured, rule = captured_with_rule(target)
    with pytest.raises(AssertionError):
        check_split(captured, rule, MESHES[mesh][1], MESHES[mesh][0])
