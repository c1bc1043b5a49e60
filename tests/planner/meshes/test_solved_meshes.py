"""Meshes that were solved and fitted: what is kept beside the best, and what is played only once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.memory.shortage import Slower
from autopar.planner.meshes import solved_meshes
from autopar.planner.meshes.contenders import Plain, Work
from autopar.planner.meshes.solved_meshes import SolvedMeshes
from autopar.planner.one_mesh.mesh_plan import Candidate, as_it_is
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.limits import LIMITS
from autopar.plans.plan_value import Prediction
from autopar.request.mesh_axes import FREE_AXIS_NAMES
from tests.planner.problems import captured_mlp, free_query

CLUSTER = Cluster.parse("1x8 H100-SXM")


def _mesh(*shape: int) -> Mesh:
    return Mesh(FREE_AXIS_NAMES[len(shape)], shape)


@pytest.fixture(scope="module")
def query() -> Query:
    return free_query(captured_mlp(), CLUSTER)


@pytest.fixture(scope="module")
def candidate(query: Query) -> Candidate:
    found = SolvedMeshes(query, [_mesh(8)])
    list(found.stages(_mesh(8)))
    assert found.best is not None
    return found.best


def test_only_a_faster_one_than_the_best_stands_beside_it(query: Query, candidate: Candidate) -> None:
    meshes = SolvedMeshes(query, [_mesh(8)])
    assert meshes.others == ()
    meshes.best = candidate
    assert meshes.others == ()
    meshes.fastest = candidate
    assert meshes.others == ()
    other = SolvedMeshes(query, [_mesh(8)])
    list(other.stages(_mesh(8)))
    meshes.fastest = other.best
    assert meshes.others == (other.best,)


def test_the_best_on_few_axes_is_played_once_for_all_meshes_of_more(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Mesh] = []

    def play(query: Query, built: Any, mesh: Mesh, free: Any) -> Candidate | None:
        played.append(mesh)
        return as_it_is(query, built, mesh, free)

    monkeypatch.setattr(solved_meshes, "as_it_is", play)
    few, more = (_mesh(8), _mesh(2, 4)), (_mesh(2, 2, 2), Mesh(FREE_AXIS_NAMES[3], (4, 2, 1)))
    meshes = SolvedMeshes(query, [*few, *more])
    for mesh in few:
        next(meshes.stages(mesh))
    assert played == []
    for mesh in more:
        meshes.refusal(mesh)
    assert len(played) == 1
    assert played[0] in few


@pytest.mark.parametrize(("shown_share", "is_refused"), [(0.5, True), (2.0, False)])
def test_a_contender_whose_step_shows_next_to_no_communication_spares_meshes_of_more_axes(
    query: Query, shown_share: float, is_refused: bool
) -> None:
    """Asked where the best optimum on few axes does not fit: nothing fits in 1 kB."""
    shown = Prediction(
        step_seconds=1.0, peak_bytes=0.0, exposed_communication_seconds=shown_share * LIMITS.least_exposed_share
    )
    asked: list[Plain | None] = []

    class Played:
        played = shown

        def step_before(self, work: Work, plain: Plain | None) -> float:
            asked.append(plain)
            return 1e3

    few, more = (_mesh(8), _mesh(2, 4)), _mesh(2, 2, 2)
    short = replace(query, budget_bytes=1e3, search=replace(query.search, table_entries=1e12))
    meshes = SolvedMeshes(short, [*few, more], contender=Played())
    for mesh in few:
        next(meshes.stages(mesh))
    assert ("communication that nothing hides" in meshes.refusal(more)) == is_refused
    (plain,) = asked
    assert plain is not None
    assert (plain.is_short, set(plain.bounds)) == (True, set(few))


@pytest.mark.parametrize("is_below", [True, False])
def test_a_mesh_is_fitted_no_further_than_to_a_bound_above_the_contender(
    query: Query, candidate: Candidate, is_below: bool
) -> None:
    short = replace(query, budget_bytes=0.7 * candidate.plan.predicted.peak_bytes)
    alone = SolvedMeshes(short, [_mesh(8)])
    free, *_, fitted = (stage.bound for stage in alone.stages(_mesh(8)))
    assert free < fitted

    class Other:
        played = None

        def step_before(self, work: Work, plain: Plain | None) -> float:
            return 0.5 * (free + fitted) if is_below else 2.0 * fitted

    meshes = SolvedMeshes(short, [_mesh(8)], contender=Other())
    if is_below:
        with pytest.raises(Slower, match="under the memory limit"):
            list(meshes.stages(_mesh(8)))
    else:
        assert list(meshes.stages(_mesh(8)))[-1].bound == fitted


@pytest.mark.parametrize("is_short", [True, False])
def test_a_mesh_behind_one_that_is_slower_under_the_limit_is_fitted_only_where_its_optimum_fits(
    query: Query, candidate: Candidate, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = _mesh(8), _mesh(2, 4)
    short = replace(query, budget_bytes=0.7 * candidate.plan.predicted.peak_bytes)

    class Other:
        played = None

        def step_before(self, work: Work, plain: Plain | None) -> float:
            assert plain is not None
            return 1.2 * plain.seconds

    meshes = SolvedMeshes(short, few, contender=Other())
    stages = {mesh: meshes.stages(mesh) for mesh in few}
    bounds = {mesh: next(stages[mesh]).bound for mesh in few}
    best, other = sorted(bounds, key=bounds.__getitem__)
    with pytest.raises(Slower, match="under the memory limit"):
        list(stages[best])
    if not is_short:
        monkeypatch.setattr(meshes, "_modelled_bytes", lambda *asked: 0.0)
    with pytest.raises(Slower, match="does not fit, as mesh" if is_short else "under the memory limit"):
        list(stages[other])
