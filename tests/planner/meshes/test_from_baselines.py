"""A baseline that costs less than the choice is searched from; one that may not be chosen never is."""

from __future__ import annotations

import pytest

from autopar.hardware.cluster import Cluster
from autopar.planner.meshes import from_baselines
from autopar.planner.meshes.baseline_plans import Baselines, as_baseline, cheapest, solved_baselines
from autopar.planner.meshes.choose_mesh import Chosen, choose_mesh
from autopar.planner.meshes.from_baselines import at_least_as_good
from autopar.planner.meshes.mesh_shapes import resolve_meshes
from autopar.planner.one_mesh.mesh_plan import Candidate
from autopar.planner.one_mesh.query import Query
from tests.planner.problems import captured_mlp, free_query

CLUSTER = Cluster.parse("8 H100-SXM")
NOTHING = Chosen(best=None, failures=(), notes=("nothing fits",))


@pytest.fixture(scope="module")
def query() -> Query:
    return free_query(captured_mlp(batch=8192, width=4096), CLUSTER)


@pytest.fixture(scope="module")
def known(query: Query) -> Baselines:
    return solved_baselines(query, None)


def candidates(known: Baselines) -> list[Candidate]:
    return sorted(
        (entry for entry in known.values() if isinstance(entry, Candidate)),
        key=lambda each: each.plan.objective_seconds,
    )


def test_where_nothing_was_chosen_the_free_search_begins_from_the_known_plan(query: Query, known: Baselines) -> None:
    start = candidates(known)[0]
    found = at_least_as_good(query, NOTHING, start)
    assert found.best is not None
    assert found.best.mesh == resolve_meshes(CLUSTER, start.mesh.shape, None)[0]
    assert found.best.plan.objective_seconds <= start.plan.objective_seconds * (1 + 1e-9)


def test_where_that_finds_nothing_either_the_known_plan_is_taken(
    query: Query, known: Baselines, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = candidates(known)[0]
    monkeypatch.setattr(from_baselines, "choose_mesh", lambda *_: NOTHING)
    found = at_least_as_good(query, NOTHING, start)
    assert found.best is start
    assert found.notes[0] == "nothing fits"
    assert "the free search found nothing that fits" in found.notes[1]


def test_a_dearer_choice_is_replaced_and_shown_beside(query: Query, known: Baselines) -> None:
    start, *_, dear = candidates(known)
    chosen = Chosen(best=dear, failures=(), alternatives=(as_baseline(dear.plan),))
    found = at_least_as_good(query, chosen, start)
    assert found.best is not None
    assert found.best.plan.objective_seconds <= start.plan.objective_seconds * (1 + 1e-9)
    assert [tuple(other.dims.values()) for other in found.alternatives] == (
        [dear.mesh.shape] * 2 if dear.mesh.shape != start.mesh.shape else []
    )


def test_an_optimum_stays(query: Query, known: Baselines) -> None:
    chosen = choose_mesh(query, resolve_meshes(CLUSTER, (8,), None))
    start = cheapest(known, ((8,),))
    assert start is not None
    assert at_least_as_good(query, chosen, start) is chosen
    assert at_least_as_good(query, NOTHING, None) is NOTHING


def test_only_meshes_that_may_be_chosen_help(known: Baselines) -> None:
    every, one_axis = cheapest(known, None), cheapest(known, ((8,),))
    assert every is candidates(known)[0]
    assert one_axis is not None
    assert one_axis.mesh.shape == (8,)
    assert cheapest(known, ()) is None
