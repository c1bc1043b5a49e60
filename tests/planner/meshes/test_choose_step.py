"""The plan with the shortest played step is chosen among what several sums of costs and the baselines give."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.meshes import baseline_plans, choose_step
from autopar.planner.meshes.baseline_plans import solved_baselines, usable
from autopar.planner.meshes.choose_mesh import Chosen, choose_mesh
from autopar.planner.meshes.choose_step import instead, shortest_step
from autopar.planner.meshes.mesh_shapes import resolve_meshes
from autopar.planner.one_mesh.mesh_plan import Candidate
from autopar.planner.one_mesh.query import Query
from autopar.planner.planning import make_plan
from autopar.planner.problem.build import Built
from autopar.planner.problem.limits import LIMITS
from autopar.plans.parallel_plan import Plan
from autopar.request import Request
from tests.planner.problems import captured_mlp, free_query

CLUSTER = Cluster.parse("4x1 H100-SXM")


@pytest.fixture(scope="module")
def query() -> Query:
    return free_query(captured_mlp(batch=2048, width=2048), CLUSTER)


@pytest.fixture(scope="module")
def chosen(query: Query) -> Chosen:
    return choose_mesh(query, resolve_meshes(CLUSTER, None, None))


@pytest.fixture(scope="module")
def known(query: Query) -> list[Candidate]:
    return usable(solved_baselines(query, None), None)


def step(candidate: Candidate | None) -> float:
    assert candidate is not None
    return candidate.plan.predicted.step_seconds


def test_nothing_found_takes_longer_than_the_sum_s_optimum_or_a_known_plan(
    query: Query, chosen: Chosen, known: list[Candidate]
) -> None:
    assert chosen.best is not None
    found = shortest_step(query, chosen, known, step(chosen.best))
    best = chosen.best if found is None else found.best
    assert step(best) <= min(step(chosen.best), *(step(each) / (1.0 - LIMITS.played_least_gain) for each in known))


def test_a_known_plan_that_is_played_faster_is_taken(query: Query, chosen: Chosen, known: list[Candidate]) -> None:
    none_hidden = replace(query, search=replace(query.search, hidden_shares=()))
    fastest = min(known, key=step)
    found = shortest_step(none_hidden, replace(chosen, others=()), known, 2.0 * step(fastest))
    assert found is not None
    assert found.best is fastest
    assert shortest_step(none_hidden, replace(chosen, others=()), known, step(fastest)) is None


def test_a_share_finds_what_the_sum_does_not(query: Query, chosen: Chosen) -> None:
    """From a poor start, so that every share has its chance; what it finds says under which sum."""
    found = shortest_step(query, replace(chosen, others=()), (), 1e3)
    assert found is not None
    assert found.best is not None
    assert found.best.plan.hidden_share in query.search.hidden_shares
    assert found.best.plan.bound_seconds <= found.best.plan.objective_seconds
    assert any("of the communication of parameters" in note for note in found.notes)


def test_what_can_only_be_as_long_as_the_shortest_step_is_not_played(
    query: Query, chosen: Chosen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds that reach the step so far exactly; a little below it, all meshes are played."""
    played: list[Mesh] = []
    limit = 1.0 - LIMITS.played_least_gain
    bound = limit

    def free(query: Query, built: Built, mesh: Mesh, stop_above: float) -> Any:
        return SimpleNamespace(lower_bound=bound, assignment=np.zeros(0))

    def fitted(query: Query, built: Built, mesh: Mesh, *rest: object) -> Candidate:
        played.append(mesh)
        raise InfeasibleError("not in this test")

    monkeypatch.setattr(choose_step, "solve_free", free)
    monkeypatch.setattr(choose_step, "fit", fitted)
    assert shortest_step(query, replace(chosen, others=()), (), 1.0) is None
    assert played == []
    bound = 0.5 * limit
    assert shortest_step(query, replace(chosen, others=()), (), 1.0) is None
    assert played


def test_a_mesh_stops_where_another_costs_as_little_under_the_same_share(
    query: Query, chosen: Chosen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first mesh of each share may cost up to the shortest step, the next up to its sum less `certified_gap`."""
    asked: list[tuple[float, float]] = []
    assert chosen.best is not None
    first = chosen.best

    def free(query: Query, built: Built, mesh: Mesh, stop_above: float) -> Any:
        return SimpleNamespace(lower_bound=0.0, assignment=np.zeros(0))

    def fitted(query: Query, built: Built, mesh: Mesh, *rest: object) -> Candidate:
        asked.append((query.hidden_share, query.stop_above))
        plan = replace(first.plan, objective_seconds=0.3, predicted=replace(first.plan.predicted, step_seconds=1.0))
        return replace(first, mesh=mesh, plan=plan)

    monkeypatch.setattr(choose_step, "solve_free", free)
    monkeypatch.setattr(choose_step, "fit", fitted)
    shortest_step(query, replace(chosen, others=()), (), 1.0)
    limits = [limit for share, limit in asked if share == asked[0][0]]
    assert len(limits) > 1
    assert limits[0] == pytest.approx(1.0 - LIMITS.played_least_gain)
    assert limits[1:] == pytest.approx([0.3 * (1.0 - LIMITS.certified_gap)] * (len(limits) - 1))


@pytest.mark.parametrize(("shown_share", "is_last"), [(0.5, True), (2.0, False)])
def test_no_mesh_is_tried_behind_a_step_that_shows_next_to_no_communication(
    query: Query, chosen: Chosen, monkeypatch: pytest.MonkeyPatch, shown_share: float, is_last: bool
) -> None:
    """Of `least_exposed_share` half shows, or twice as much; and no share is tried where that is the plan so far."""
    tried: list[float] = []
    assert chosen.best is not None
    shown = replace(
        chosen.best.plan.predicted,
        step_seconds=0.5,
        exposed_communication_seconds=0.5 * shown_share * LIMITS.least_exposed_share,
    )
    such = replace(chosen.best, plan=replace(chosen.best.plan, objective_seconds=0.3, predicted=shown))

    def found(query: Query, mesh: Mesh, *rest: object) -> Candidate:
        tried.append(query.hidden_share)
        return replace(such, mesh=mesh)

    monkeypatch.setattr(choose_step, "_found", found)
    monkeypatch.setattr(choose_step, "roles_of", lambda *given: ())
    shortest_step(query, replace(chosen, others=()), (), 1.0)
    assert tried, "the plan so far shows more"
    assert (len(tried) == 1) == is_last
    tried.clear()
    shortest_step(query, replace(chosen, best=such, others=()), (), 1.0)
    assert (tried == []) == is_last


def test_copies_of_states_that_do_not_fit_are_refused_before_anything_is_priced(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of 2048 x 2048 parameters, fp32 with gradients and two moments: 134 MB whole, a quarter of that over
    four ranks."""
    priced: list[Mesh] = []

    def on_mesh(query: Query, mesh: Mesh, below: float) -> Candidate:
        priced.append(mesh)
        raise InfeasibleError("not in this test")

    monkeypatch.setattr(baseline_plans, "plan_on_mesh", on_mesh)
    baselines = solved_baselines(replace(query, budget_bytes=100e6), None)
    assert [mesh.axis_names for mesh in priced] == [("dp_shard",), ("tp",), ("dp_shard", "tp")]
    assert "whole along dp_replicate" in str(baselines["DDP"])


def test_the_plan_says_what_it_took_the_place_of(query: Query, chosen: Chosen, known: list[Candidate]) -> None:
    assert chosen.best is not None
    plan = instead(chosen.best.plan, known[0].plan)
    assert plan.alternatives[0].name == "smallest sum of costs"
    assert plan.alternatives[0].predicted == chosen.best.plan.predicted
    assert "chosen by its played step" in plan.notes[-1]


def test_a_fast_search_asks_the_known_plans_only(query: Query) -> None:
    plan: Plan = make_plan(query.program, Request(cluster=CLUSTER, mode="fast"))
    assert plan.hidden_share == 0.0
    known_steps = [b.predicted.step_seconds for b in plan.baselines if b.predicted is not None]
    assert plan.predicted.step_seconds <= min(known_steps) / (1.0 - LIMITS.played_least_gain)


def test_the_whole_search_is_never_slower_than_the_known_plans(query: Query) -> None:
    plan = make_plan(query.program, Request(cluster=CLUSTER))
    known_steps = [b.predicted.step_seconds for b in plan.baselines if b.predicted is not None]
    assert known_steps
    assert plan.predicted.step_seconds <= min(known_steps) / (1.0 - LIMITS.played_least_gain)
