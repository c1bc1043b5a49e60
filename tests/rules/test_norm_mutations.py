"""Faults in split softmax, norms and recurrent layers are seen by the proof: a statistic or a gradient not reduced."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx

from autopar.layouts.placement import Mesh
from autopar.passes.implementations.local_context import LocalContext
from autopar.rules.engine import rule_for
from tests.rules import cases_norms, cases_recurrent
from tests.rules.case_values import Case
from tests.rules.execution import Captured, capture_call, check_split

SPLIT = [
    (case, name)
    for case in cases_norms.CASES
    for name in rule_for(capture_call(case.target, case.build(12), case.kwargs).node).synchronised_bytes  # type: ignore[union-attr]
]
MESH = Mesh(("tp",), (2,))


def is_caught(captured: Captured, name: str) -> bool:
    rule = rule_for(captured.node)
    assert rule is not None
    try:
        check_split(captured, rule, (name,), MESH)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("case", "name"), SPLIT, ids=lambda part: getattr(part, "name", part))
def test_a_sum_that_is_not_reduced_is_caught(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture_call(case.target, case.build(12), case.kwargs)
    assert not is_caught(captured, name)
    whole = LocalContext.all_reduce

    def without_sums(self: LocalContext, value: fx.Node, axes: tuple[int, ...], op: str = "sum") -> fx.Node:
        return value if op == "sum" else whole(self, value, axes, op)

    monkeypatch.setattr(LocalContext, "all_reduce", without_sums)
    assert is_caught(captured, name)


@pytest.mark.parametrize("case", [c for c in cases_recurrent.CASES if "backward" in c.name], ids=lambda case: case.name)
def test_weight_gradients_that_are_not_summed_are_caught(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture_call(case.target, case.build(12), case.kwargs)
    rule = rule_for(captured.node)
    assert rule is not None
    assert not is_caught(captured, "b")
    unreduced = dataclasses.replace(rule, reductions={})
    with pytest.raises(AssertionError):
        check_split(captured, unreduced, ("b",), MESH)


def test_a_row_that_no_rank_sees_is_zero() -> None:
    case = next(case for case in cases_norms.CASES if "_safe_softmax" in case.name)
    captured = capture_call(case.target, case.build(12), case.kwargs)
    assert torch.equal(captured.results[0][0], torch.zeros(12, dtype=torch.float64))
    assert not is_caught(captured, "n")
