"""Rungs of the memory ladder: every value that backward reads is on one, by the word of the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.memory.rungs import Rungs, in_order, rung_of
from autopar.plans.plan_value import OperatorPlan
from autopar.plans.rung_names import IN_SPANS, KEPT, ON_HOST, RECOMPUTED, STATES_ON_HOST
from tests.planner.one_mesh.test_host_labels import DEPTH, SAVED, SMALL, STATES, planned

PLAIN = OperatorPlan(axes=(), inputs=(), outputs=())


@pytest.mark.parametrize(
    ("limit", "offload", "rungs"),
    [
        (SMALL, "all", {KEPT, ON_HOST, STATES_ON_HOST}),
        (STATES + 9 * SAVED, "activations", {KEPT, IN_SPANS}),
        (STATES + 12 * SAVED, None, {KEPT, IN_SPANS}),
    ],
    ids=["host", "spans", "fewer"],
)
def test_every_value_that_backward_reads_is_on_one_rung(limit: int, offload: str | None, rungs: set[str]) -> None:
    sizes = planned(limit, offload=offload).predicted.bytes_by_rung
    assert set(sizes) == rungs
    assert sum(size for rung, size in sizes.items() if rung != STATES_ON_HOST) == DEPTH * SAVED


def test_a_rung_is_what_the_plan_says_of_an_operator() -> None:
    assert rung_of(PLAIN, in_span=True) == KEPT
    assert rung_of(replace(PLAIN, saved_on="host"), in_span=False) == ON_HOST
    again = replace(PLAIN, recompute=True)
    assert (rung_of(again, in_span=False), rung_of(again, in_span=True)) == (RECOMPUTED, IN_SPANS)


def test_a_way_that_the_table_does_not_have_joins_by_its_own_name() -> None:
    plan = planned(4 * STATES)
    name = next(name for name in plan.operators if name.endswith("tanh#0"))
    operators = {**plan.operators, name: replace(plan.operators[name], saved_on="file")}
    rungs = Rungs(replace(plan, operators=operators))
    assert rungs.are_several
    assert rungs.of_operator[name] == "file"
    assert not Rungs(plan).are_several
    assert list(in_order({"file": 1.0, ON_HOST: 2.0, KEPT: 3.0})) == [KEPT, ON_HOST, "file"]
