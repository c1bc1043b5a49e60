"""A ring that was chosen freely is held against the best plan without one by the played step."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.cost_models.operators_attention import softmax_on_cpu
from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import OperatorCurve
from autopar.layouts.placement import Mesh
from autopar.planner.memory.shortage import SearchEnded
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.constraint_targets import implementations_of
from autopar.planner.search.context_ways import planned_the_other_ways_too
from autopar.plans.parallel_plan import Plan
from autopar.request.axis_ways import CONTEXT_WAYS, ContextParallelism
from autopar.request.constraints import Constraints
from tests.planner.problems import captured_mlp, free_query

LENGTH, HEADS, WIDTH = 2048, 4, 64
DOES_NOT_FIT = InfeasibleError("does not fit")
ENDED = SearchEnded(Mesh(("cp",), (4,)), 1.0, 1e9)
ENDED_WITHOUT_CP = SearchEnded(Mesh(("tp",), (4,)), 1.0, 1e9)


class Attention(nn.Module):
    """forward(x (1, 2048, 64)) -> loss of one causal layer."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = [part(x).view(1, LENGTH, HEADS, -1).transpose(1, 2) for part in self.parts]
        return functional.scaled_dot_product_attention(*heads, is_causal=True).square().mean()


def planned(cluster: Cluster | str = "4x1 cpu @ 1Gb", **asked: Any) -> Plan:
    with torch.device("meta"):
        module, x = Attention(), torch.empty(1, LENGTH, WIDTH)
    found = autopar.plan(module, (x,), cluster=cluster, dims={"cp": 4}, mode="fast", micro_batches=1, **asked,
        with_baselines=False)
    assert isinstance(found, Plan)
    return found


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {way: planned(cp=way) for way in ("ring", "gather")}


def test_every_way_runs_at_the_measured_rate_of_attention() -> None:
    """A profile whose attention takes 1 ns a FLOP: nothing else takes time, in the search and in the played program."""
    cluster = Cluster.parse("4x1 cpu @ 1Gb")
    assert isinstance(cluster, Cluster)
    curves = tuple(
        OperatorCurve(operator=name, dtype="float32", work=(1e3, 1e12), seconds=(1e-6, 1e3))
        for name in ("attention", "attention_backward")
    )
    slow = replace(cluster, device=replace(cluster.device, operators=curves))
    found = [planned(slow, cp=way) for way in CONTEXT_WAYS]
    pairs = LENGTH**2 / 2 / 4  # of a rank, without what blocks of keys add
    least = 1e-9 * pairs * 2 * 7 * WIDTH * softmax_on_cpu(WIDTH / HEADS, WIDTH / HEADS)
    for plan in found:
        assert least < plan.predicted.compute_seconds < 1.6 * least
        assert least < plan.objective_seconds < 1.6 * least


def _lasting(plan: Plan, seconds: float, shown: float = 0.1) -> Plan:
    """shown: part of the seconds that communication adds."""
    predicted = replace(plan.predicted, step_seconds=seconds, exposed_communication_seconds=shown * seconds)
    return replace(plan, predicted=predicted)


def _answer(
    plans: dict[str, Plan],
    seconds: dict[str | None, float],
    asked: ContextParallelism | None = None,
    shown: float = 0.1,
    host: float = 0.0,
    failure: InfeasibleError = DOES_NOT_FIT,
) -> tuple[Plan, list[Any]]:
    """What is answered where a search without a way finds the ring, and which ways were searched; a way that has no
    seconds cannot be planned."""
    query = free_query(captured_mlp(), replace(Cluster.parse("4 cpu"), collective_host_seconds=host))
    searched: list[Any] = []

    def search(query: Query) -> Plan:
        way = query.constraints.cp or ("no ring" if query.constraints.without_rings else None)
        searched.append(way)
        if way not in seconds:
            raise failure
        return _lasting(plans["ring" if way in (None, "ring") else "gather"], seconds[way], shown)

    asking = replace(query, constraints=replace(query.constraints, cp=asked))
    return planned_the_other_ways_too(search, asking), searched


def test_the_shortest_played_step_is_the_answer_and_says_so(plans: dict[str, Plan]) -> None:
    plan, searched = _answer(plans, {None: 0.3, "no ring": 0.2})
    assert searched == [None, "no ring"]
    assert plan.operators == plans["gather"].operators
    assert plan.bound_seconds == plans["ring"].bound_seconds < plans["gather"].bound_seconds  # of the question asked
    assert plan.gap == pytest.approx(1 - plan.bound_seconds / plan.objective_seconds)
    assert plan.notes[-1].startswith("attention over cp: no ring has the shortest step (as chosen 300")


def test_without_rings_no_attention_is_one_and_other_alternatives_stay_free() -> None:
    program = capture(Attention(), (torch.empty(1, LENGTH, WIDTH),))
    asked = implementations_of(program, Constraints(without_rings=True))
    found = {str(node.meta["operator"]): name for node, name in asked.items()}
    assert len(found) == 2, "attention and its backward"
    assert all("attention" in name for name in found)
    assert set(found.values()) == {"default"}


def test_a_ring_that_is_shorter_stays_as_it_was_found(plans: dict[str, Plan]) -> None:
    for others in ({"no ring": 0.2}, {}):  # what cannot be planned is passed over
        plan, searched = _answer(plans, {None: 0.1, **others})
        assert searched == [None, "no ring"]
        assert plan == _lasting(plans["ring"], 0.1)


def test_a_ring_that_hides_is_held_against_nothing(plans: dict[str, Plan]) -> None:
    assert _answer(plans, {None: 0.3, "no ring": 0.2}, shown=0.01)[1] == [None]
    searched = _answer(plans, {None: 0.3, "no ring": 0.2}, shown=0.01, host=1e-3)[1]
    assert searched == [None, "no ring"], "processors pay for what does not show"


def test_a_way_that_was_asked_for_and_a_choice_without_a_ring_are_final(plans: dict[str, Plan]) -> None:
    assert _answer(plans, {"ring": 0.3, "gather": 0.2}, asked="ring")[1] == ["ring"]
    assert _answer({"ring": plans["gather"], "gather": plans["gather"]}, {None: 0.3, "gather": 0.2})[1] == [None]


@pytest.mark.parametrize(("gap", "searched"), [(0.05, [None, "ring", "no ring"]), (0.005, [None, "no ring"])])
def test_a_ring_is_planned_by_name_too_where_the_search_ended_with_a_gap(
    plans: dict[str, Plan], gap: float, searched: list[Any]
) -> None:
    open_ring = replace(plans["ring"], gap=gap)
    plan, found = _answer({**plans, "ring": open_ring}, {None: 0.3, "ring": 0.2, "no ring": 0.25})
    assert found == searched
    assert plan.predicted.step_seconds == (0.2 if "ring" in searched else 0.25)
    best = "ring" if "ring" in searched else "no ring"
    assert plan.notes[-1].startswith(f"attention over cp: {best} has the shortest step (as chosen 300")


def test_a_ring_is_the_answer_where_the_search_of_all_ways_ended_without_a_plan(plans: dict[str, Plan]) -> None:
    plan, searched = _answer(plans, {"ring": 0.2}, failure=ENDED)
    assert searched == [None, "ring"]
    assert plan.operators == plans["ring"].operators
    assert plan.notes[-1].endswith("ended without a plan; the bound is that of rings")


@pytest.mark.parametrize(
    ("asked", "failure", "tried"),
    [
        (None, DOES_NOT_FIT, [None]),
        (None, ENDED_WITHOUT_CP, [None]),
        ("gather", ENDED, ["gather"]),
        (None, ENDED, [None, "ring"]),
    ],
)
def test_what_does_not_fit_or_was_asked_for_is_no_ring(
    asked: ContextParallelism | None, failure: InfeasibleError, tried: list[Any]
) -> None:
    searched: list[Any] = []

    def search(query: Query) -> Plan:
        searched.append(query.constraints.cp)
        raise failure

    query = free_query(captured_mlp(), Cluster.parse("4 cpu"))
    with pytest.raises(InfeasibleError, match=re.escape(str(failure))):
        planned_the_other_ways_too(search, replace(query, constraints=replace(query.constraints, cp=asked)))
    assert searched == tried
