"""Broken reductions over a split dim: the proof by execution sees every one of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx

from autopar.layouts.placement import Mesh
from autopar.passes.implementations.local_context import LocalContext
from autopar.rules.engine import rule_for
from autopar.rules.rule import Rule
from tests.rules import cases_statistics
from tests.rules.execution import Captured, capture_call, check_split

CASES = {case.name: case for case in cases_statistics.CASES}
SYNCHRONISED = [
    *("aten.var.correction/reduced", "aten.var_mean.correction/reduced", "aten.std.correction/reduced"),
    *("aten.logsumexp.default/reduced", "aten.linalg_vector_norm.default/reduced"),
]


def captured_with_rule(name: str) -> tuple[Captured, Rule]:
    torch.manual_seed(1)
    captured = capture_call(CASES[name].target, CASES[name].build(12), CASES[name].kwargs)
    rule = rule_for(captured.node)
    assert rule is not None
    return captured, rule


def is_correct(captured: Captured, rule: Rule) -> bool:
    """Whether splitting the last name, which is reduced, equals the plain operator."""
    try:
        check_split(captured, rule, (rule.names[-1],), Mesh(("tp",), (3,)))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", SYNCHRONISED)
def test_statistics_that_are_not_synchronised_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, rule = captured_with_rule(name)
    assert is_correct(captured, rule)

    def local(self: LocalContext, value: fx.Node, axes: tuple[int, ...], op: str = "sum") -> fx.Node:
        return value

    monkeypatch.setattr(LocalContext, "all_reduce", local)
    assert not is_correct(captured, rule)


@pytest.mark.parametrize("name", ["aten.any.default/last", "aten.all.dim/reduced"])
def test_or_in_place_of_and_is_caught(name: str) -> None:
    captured, rule = captured_with_rule(name)
    assert is_correct(captured, rule)
    split = rule.names[-1]
    swapped = tuple({"max": "min", "min": "max"}.get(op or "") for op in rule.reductions[split])
    assert not is_correct(captured, dataclasses.replace(rule, reductions={split: swapped}))
