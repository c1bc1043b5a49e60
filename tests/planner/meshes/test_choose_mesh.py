"""The mesh is chosen: the best of all shapes, what became of the others, and what each axis does."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture, normalize_example_inputs
from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.axis_roles import axis_notes
from autopar.planner.meshes.choose_mesh import choose_mesh, perfect_seconds
from autopar.planner.meshes.mesh_shapes import coarser, link_key, resolve_meshes
from autopar.planner.one_mesh.mesh_plan import plan_on_mesh, price, solve_free
from autopar.planner.one_mesh.query import Query
from autopar.plans.parallel_plan import Plan
from tests.planner.problems import free_query

CLUSTER = "2x4 H100-SXM"
PER_NODE = 4


class Mlp(nn.Module):
    """Two layers wide enough that splitting them pays."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean()


def model() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Mlp(4096, 16384), torch.empty(64, 512, 4096)


def query(cluster: str = CLUSTER) -> Query:
    program = capture(model()[0], *normalize_example_inputs(model()[1]))
    return free_query(program, Cluster.parse(cluster), "max")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """What the search over meshes finds and says, before played steps are compared."""
    asked = query()
    found = choose_mesh(asked, resolve_meshes(asked.cluster, None, None))
    assert found.best is not None
    best = found.best.plan
    return replace(
        best,
        statistics={**best.statistics, **found.statistics},
        notes=(*found.axis_notes, *found.notes),
        alternatives=found.alternatives,
    )


@pytest.fixture(scope="module")
def optima() -> dict[Mesh, float]:
    asked = query()
    found = {}
    for mesh in resolve_meshes(asked.cluster, None, None):
        found[mesh] = solve_free(asked, price(asked, mesh), mesh).objective
    return found


def test_the_plan_is_the_best_over_all_shapes(plan: Plan, optima: dict[Mesh, float]) -> None:
    assert plan.objective_seconds <= min(optima.values()) * (1 + 1e-6)
    assert plan.statistics["meshes"] == len(resolve_meshes(Cluster.parse(CLUSTER), None, None))


def test_no_finer_mesh_is_dearer_than_a_coarser_one(optima: dict[Mesh, float]) -> None:
    """Every plan on (ab, c) is one on (a, b, c), and costs the same there."""
    pairs = 0
    for fine, coarse in itertools.permutations(optima, 2):
        if link_key(coarse, PER_NODE) in coarser(fine, PER_NODE):
            assert optima[fine] <= optima[coarse] * (1 + 1e-9), (fine.shape, coarse.shape)
            pairs += 1
    assert pairs >= 5, "1-D under 2-D, 1-D and 2-D under 3-D"


def test_no_mesh_beats_perfect_work(optima: dict[Mesh, float]) -> None:
    bound = perfect_seconds(query())
    assert 0.5 * min(optima.values()) < bound <= min(optima.values())


def test_every_other_mesh_has_its_objective_or_the_bound_that_dropped_it(plan: Plan) -> None:
    assert plan.alternatives
    for other in plan.alternatives:
        known = other.bound_seconds if other.objective_seconds is None else other.objective_seconds
        assert other.error is not None or (known is not None and known >= plan.objective_seconds * (1 - 1e-6))
    assert plan.statistics["bound_over_all_meshes_seconds"] <= plan.objective_seconds
    assert any(note.startswith("other meshes: ") for note in plan.notes)


def test_the_plan_says_what_every_free_axis_does(plan: Plan) -> None:
    for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True):
        assert any(note.startswith(f"axis {name}={size} (") and " works as " in note for note in plan.notes)


@pytest.mark.parametrize("name", ["dp_replicate", "dp_shard", "tp"])
def test_an_axis_works_as_its_name_asks(name: str) -> None:
    """The role of a pinned axis, read from its plan as if the axis were free, is its name."""
    asked = query("8 H100-SXM")
    candidate = plan_on_mesh(asked, Mesh((name,), (8,)))
    free = Mesh(("inner",), (8,))
    notes = axis_notes(asked.program, asked.factorisation, asked.cluster, free, candidate.built, candidate.solution)
    assert len(notes) == 1
    assert notes[0].startswith(f"axis inner=8 (inside a node) works as {name}: 100% of the FLOPs")


def test_refinements_are_refused_in_words_once_their_tables_grow_too_large() -> None:
    found = autopar.plan(*model(), cluster=CLUSTER, mode="fast")
    assert len(found.mesh.shape) <= 2
    assert any("mesh shapes of 3 axes were not tried: their tables have about" in note for note in found.notes)
    bound = found.statistics["bound_over_all_meshes_seconds"]
    assert isinstance(bound, float)
    assert 0 < bound < found.objective_seconds


def test_refinements_are_left_out_where_hardly_any_communication_shows() -> None:
    """Computation fills the step: meshes of three axes could only save what little communication it does not hide."""
    with torch.device("meta"):
        layers, x = Mlp(4096, 16384), torch.empty(8192, 512, 4096)
    asked = free_query(capture(layers, *normalize_example_inputs(x)), Cluster.parse(CLUSTER), "max")
    found = choose_mesh(asked, resolve_meshes(asked.cluster, None, None))
    assert found.best is not None
    assert len(found.best.mesh.shape) <= 2
    assert max(len(mesh.shape) for mesh in found.free_bounds) == 2
    assert any("is communication that nothing hides" in note for note in found.notes), found.notes


def test_a_plan_that_must_be_cheaper_is_not_fitted_above() -> None:
    asked, mesh = query(), Mesh(("tp",), (8,))
    seconds = solve_free(asked, price(asked, mesh), mesh).objective
    with pytest.raises(InfeasibleError, match="takes at least"):
        plan_on_mesh(asked, mesh, below=0.99 * seconds)
    plan = plan_on_mesh(asked, mesh, below=1.01 * seconds).plan
    assert plan.objective_seconds == pytest.approx(seconds)


def test_a_given_mesh_has_no_alternatives() -> None:
    found = autopar.plan(*model(), cluster=CLUSTER, mesh=(2, 4), with_baselines=False)
    assert not found.alternatives
    assert "meshes" not in found.statistics


@pytest.mark.exhaustive
def test_the_choice_is_the_same_again() -> None:
    first, again = (autopar.plan(*model(), cluster=CLUSTER) for _ in range(2))
    assert not replace(first, question={}).diff(again)
