"""The mesh is chosen: the best of all shapes, what became of the others, and what each axis does."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture, normalize_example_inputs
from autopar.cluster import Cluster
from autopar.layout import Mesh
from autopar.parallel_plan import Plan
from autopar.planner.choose_mesh import perfect_seconds
from autopar.planner.constraints import Constraints
from autopar.planner.factorisation import Factorisation
from autopar.planner.mesh_shapes import coarser, link_key, resolve_meshes
from autopar.planner.one_mesh import price, solve_free
from autopar.planner.optimizers import state_bytes
from autopar.planner.query import Query, kernel_backend
from autopar.planner.search import SEARCH

CLUSTER = "2x8 H100-SXM"


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
    parsed = Cluster.parse(cluster)
    return Query(
        program=program,
        cluster=parsed,
        state_bytes=state_bytes(program, None),
        constraints=Constraints(),
        budget_bytes=float("inf"),
        kernel_backend=kernel_backend(parsed),
        factorisation=Factorisation(program),
        search=SEARCH["max"],
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(*model(), cluster=CLUSTER, mode="max")


@pytest.fixture(scope="module")
def optima() -> dict[Mesh, float]:
    asked = query()
    found = {}
    for mesh in resolve_meshes(asked.cluster, None, None):
        if len(mesh.shape) <= 3:
            found[mesh] = solve_free(asked, price(asked, mesh), mesh).objective
    return found


def test_the_plan_is_the_best_over_all_shapes(plan: Plan, optima: dict[Mesh, float]) -> None:
    assert plan.objective_seconds <= min(optima.values()) * (1 + 1e-6)
    assert plan.statistics["meshes"] == len(resolve_meshes(Cluster.parse(CLUSTER), None, None))


def test_no_finer_mesh_is_dearer_than_a_coarser_one(optima: dict[Mesh, float]) -> None:
    """Every plan on (ab, c) is one on (a, b, c); moving along more axes adds at most its tie-breaks."""
    pairs = 0
    for fine, coarse in itertools.permutations(optima, 2):
        if link_key(coarse, 8) in coarser(fine, 8):
            assert optima[fine] <= optima[coarse] + 1e-6, (fine.shape, coarse.shape)
            pairs += 1
    assert pairs >= 5


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


def test_axes_do_what_their_names_would_ask() -> None:
    """The role of a pinned axis, read from its plan as if it were free, is its name."""
    for dims in ({"dp_shard": 8}, {"dp_replicate": 8}, {"tp": 8}):
        named = autopar.plan(*model(), cluster="8 H100-SXM", dims=dims)
        (name,) = dims
        layouts = {n: p.stored[0] for n, p in named.parameters.items()}
        free = autopar.plan(
            *model(),
            cluster="8 H100-SXM",
            mesh=(8,),
            constraints={n: {"inner": str(p)} for n, p in layouts.items()},
        )
        role = next(note for note in free.notes if note.startswith("axis inner=8"))
        assert f"works as {name}:" in role or name == "tp", role
        assert "inside a node" in role


def test_refinements_are_refused_in_words_once_their_tables_grow_too_large() -> None:
    found = autopar.plan(*model(), cluster=CLUSTER, mode="fast")
    assert len(found.mesh.shape) <= 2
    assert any("mesh shapes of 3 axes were not tried: their tables have about" in note for note in found.notes)
    assert any("mesh shapes of 4 axes were not tried: no mesh of 3 axes was" in note for note in found.notes)
    bound = found.statistics["bound_over_all_meshes_seconds"]
    assert isinstance(bound, float)
    assert 0 < bound < found.objective_seconds


def test_a_given_mesh_has_no_alternatives() -> None:
    found = autopar.plan(*model(), cluster=CLUSTER, mesh=(2, 8))
    assert not found.alternatives
    assert "meshes" not in found.statistics


def test_the_choice_is_the_same_again(plan: Plan) -> None:
    again = autopar.plan(*model(), cluster=CLUSTER, mode="max")
    assert not dataclasses.replace(plan, question={}).diff(again)
