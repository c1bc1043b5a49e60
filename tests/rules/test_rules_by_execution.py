"""Every rule of the table is executed: shard, run on every rank, reassemble, compare with the plain operator."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest
import torch

from autopar.layouts.placement import Mesh
from autopar.rules import engine
from autopar.rules.child_process import run_in_child
from autopar.rules.engine import TABLE, rule_for
from autopar.rules.rule import Rule
from tests.rules.execution import Captured, capture_call, check_linear, check_split, is_possible, name_pairs
from tests.rules.operator_cases import CASES, Case

EVEN, UNEVEN = 12, (7, 5)


def captured_with_rule(case: Case, size: int) -> tuple[Captured, Rule]:
    torch.manual_seed(size)  # the one that what was captured has drawn with
    return _captured_with_rule(case, size)


@cache  # no check changes either
def _captured_with_rule(case: Case, size: int) -> tuple[Captured, Rule]:
    captured = capture_call(case.target, case.build(size), case.kwargs)
    rule = rule_for(captured.node)
    assert rule is not None, f"{case.target} has no rule"
    return captured, rule


@pytest.mark.exhaustive(every=10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("size", [EVEN, *(pytest.param(size, marks=pytest.mark.slow) for size in UNEVEN)])
def test_splitting_one_axis_equals_the_plain_operator(case: Case, size: int) -> None:
    captured, rule = captured_with_rule(case, size)
    for name, extent in itertools.product(rule.names, (2, 3, 4)):
        mesh = Mesh(("tp",), (extent,))
        if is_possible(captured, rule, (name,), mesh):
            check_split(captured, rule, (name,), mesh)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_name_is_split_in_some_case(case: Case) -> None:
    captured, rule = captured_with_rule(case, EVEN)
    for name in rule.names:
        extents = [n for n in (2, 3, 4) if is_possible(captured, rule, (name,), Mesh(("tp",), (n,)))]
        assert extents, f"{name} of {case.name} is never split"


@pytest.mark.exhaustive(every=10)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_splitting_two_axes_equals_the_plain_operator(case: Case) -> None:
    captured, rule = captured_with_rule(case, EVEN)
    mesh = Mesh(("dp", "tp"), (2, 2))
    for names in name_pairs(rule):
        if is_possible(captured, rule, names, mesh):
            check_split(captured, rule, names, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_splitting_an_inner_factor_of_a_dim_equals_the_plain_operator(case: Case) -> None:
    captured, rule = captured_with_rule(case, EVEN)
    mesh = Mesh(("tp",), (2,))
    for name in rule.names:
        if not rule.needs_one_range(name) and is_possible(captured, rule, (name,), mesh, stride=2):
            check_split(captured, rule, (name,), mesh, stride=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_split_equals_the_plain_operator(case: Case) -> None:
    captured, rule = captured_with_rule(case, EVEN)
    check_split(captured, rule, (None,), Mesh(("tp",), (2,)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_linear_operators_pass_summands_on(case: Case) -> None:
    captured, rule = captured_with_rule(case, EVEN)
    for marks in rule.linear:
        check_linear(captured, marks, 3)


def test_every_rule_has_a_case() -> None:
    tested = {engine.table_key(case.target) for case in CASES}
    assert set(TABLE) - tested == set()


def fails(captured: Captured, rule: Rule, name: str) -> bool:
    try:
        check_split(captured, rule, (name,), Mesh(("tp",), (3,)))
    except (AssertionError, RuntimeError, IndexError):
        return True
    return False


def splits_in_three(captured: Captured, rule: Rule, name: str) -> bool:
    return is_possible(captured, rule, (name,), Mesh(("tp",), (3,)))


def has_bools(captured: Captured) -> bool:
    """A sum of bools is an or; `test_statistics_mutations.py` swaps or and and."""
    return any(isinstance(result, torch.Tensor) and result.dtype == torch.bool for result in captured.results)


REDUCED = [
    (case, name)
    for case in CASES
    for captured, rule in [captured_with_rule(case, EVEN)]
    for name, ops in rule.reductions.items()
    if any(ops) and "empty" not in case.name and not has_bools(captured) and splits_in_three(captured, rule, name)
]


AS_GOOD = {("autopar.cross_entropy", "min")}
"""Logarithms of probabilities are at most 0, so that the smallest of one and zeros is their sum."""


@pytest.mark.parametrize(("case", "name"), REDUCED, ids=lambda part: getattr(part, "name", part))
def test_wrong_reductions_are_caught(case: Case, name: str) -> None:
    captured, rule = captured_with_rule(case, EVEN)
    for wrong in ("sum", "max", "min", None):
        swapped = tuple(wrong if op else None for op in rule.reductions[name])
        if swapped != rule.reductions[name] and (engine.table_key(case.target), wrong) not in AS_GOOD:
            mutated = dataclasses.replace(rule, reductions={**rule.reductions, name: swapped})
            assert fails(captured, mutated, name), f"{wrong} instead of {rule.reductions[name]} is not seen"


# operators that draw, and attention whose kernels take no window, always use their local form; pairs of names are run
# by tests/passes/kernels/test_dispatched_rows.py
IMPLEMENTED = [
    (case, name)
    for case in CASES
    for captured, rule in [captured_with_rule(case, EVEN)]
    for name in rule.implementations
    if name not in rule.pairs
    and "dropout" not in case.name
    and not (case.name.startswith("autopar.attention") and "window" in case.name)
    and splits_in_three(captured, rule, name)
]


@pytest.mark.exhaustive(every=10)
@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), IMPLEMENTED, ids=lambda part: getattr(part, "name", part))
def test_missing_implementations_are_caught(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, rule = captured_with_rule(case, EVEN)
    without = dataclasses.replace(rule, implementations={})
    monkeypatch.setattr("autopar.passes.lowering.local_call.rule_as", lambda node, implementation: without)
    (failed,), crashes = run_in_child(lambda _: fails(captured, without, name), 1)
    assert failed or crashes, "the blocks alone give the right result"  # raw kernels may crash on them
