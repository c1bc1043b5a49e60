"""The problem of a captured model: its optimum obeys what must hold for any model."""

import dataclasses

import numpy as np
import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh, Partial, Replicate, Shard
from autopar.planner.one_mesh.read_solution import read_operators, read_parameters, replicated_flops_share
from autopar.planner.problem.build import Built
from autopar.planner.solver import FORBIDDEN, Solution, Status, check_certificate, evaluate, solve
from autopar.request.constraints import Constraints
from tests.planner.problems import build, captured_mlp

H100 = Cluster.parse("1x8 H100-SXM")
LARGE = {"batch": 4096, "width": 2048}


def solved(mesh: Mesh, constraints: Constraints | None = None, **size: int) -> tuple[Built, Solution]:
    built = build(captured_mlp(**size), H100, mesh, constraints)
    return built, solve(built.problem)


def test_the_optimum_is_proven_and_equals_its_recomputed_cost() -> None:
    built, solution = solved(Mesh(("inner",), (8,)), **LARGE)
    assert solution.status is Status.OPTIMAL
    assert solution.lower_bound <= solution.objective * (1 + 1e-12)
    assert evaluate(built.problem, solution.assignment)[0] == pytest.approx(solution.objective, rel=1e-12)
    check_certificate(built.problem, solution)


@pytest.mark.parametrize("sizes", [LARGE, {"batch": 16, "width": 8}], ids=["split", "replicated"])
def test_two_axes_are_never_worse_than_one_on_the_same_links(sizes: dict[str, int]) -> None:
    """What a small model replicates on one axis it replicates on both: tie-breaks add up to the same."""
    _, flat = solved(Mesh(("inner",), (8,)), **sizes)
    for shape in ((2, 4), (4, 2)):
        _, square = solved(Mesh(("outer", "inner"), shape), **sizes)
        assert square.objective <= flat.objective * (1 + 1e-12)


def test_no_chosen_redistribution_is_forbidden() -> None:
    built, solution = solved(Mesh(("outer", "inner"), (2, 4)), **LARGE)
    chosen = [
        edge.costs[solution.assignment[edge.source], solution.assignment[edge.target]] for edge in built.problem.edges
    ]
    assert max(chosen) < FORBIDDEN / 2


def test_adding_a_legal_strategy_never_raises_the_optimum() -> None:
    _, free = solved(Mesh(("inner",), (4,)), **LARGE)
    for name in ("dp_replicate", "dp_shard", "tp"):
        _, pinned = solved(Mesh((name,), (4,)), **LARGE)
        assert free.objective <= pinned.objective * (1 + 1e-9)


def test_replicated_parameters_and_a_split_batch_are_ddp() -> None:
    built, solution = solved(Mesh(("dp_replicate",), (4,)))
    parameters = read_parameters(built, solution.assignment)
    assert all(p.stored == (Replicate(),) for p in parameters.values())
    operators = read_operators(built, solution.assignment, Mesh(("dp_replicate",), (4,)))
    weight_gradients = [o for name, o in operators.items() if "/mm" in name and name.endswith("/bwd")]
    assert any(o.outputs == ((Partial("sum"),),) for o in weight_gradients)


def test_stored_shards_that_are_gathered_for_use_are_zero_3() -> None:
    built, solution = solved(Mesh(("dp_shard",), (4,)))
    parameters = read_parameters(built, solution.assignment)
    assert all(isinstance(p.stored[0], Shard) and not p.keep_gathered for p in parameters.values())
    assert replicated_flops_share(built, solution.assignment, Mesh(("dp_shard",), (4,))) == 0.0


def test_a_column_and_a_row_matrix_are_megatron() -> None:
    built, solution = solved(Mesh(("tp",), (4,)))
    parameters = read_parameters(built, solution.assignment)
    assert parameters["up.weight"].stored == (Shard(0),)
    assert isinstance(parameters["down.weight"].stored[0], Shard)
    operators = read_operators(built, solution.assignment, Mesh(("tp",), (4,)))
    assert operators["up/mm#0"].axes == ("n",)


def test_pinned_placements_are_kept() -> None:
    wanted = Constraints(placements={"up.weight": {"inner": Shard(1)}})
    built, solution = solved(Mesh(("inner",), (4,)), wanted)
    assert read_parameters(built, solution.assignment)["up.weight"].stored == (Shard(1),)


def test_no_replicated_compute_splits_every_heavy_operator() -> None:
    mesh = Mesh(("inner",), (4,))
    built, solution = solved(mesh, Constraints(no_replicated_compute=True))
    assert replicated_flops_share(built, solution.assignment, mesh) == 0.0


def test_a_batch_that_does_not_divide_is_not_cut_and_noted_by_its_layout() -> None:
    built, solution = solved(Mesh(("dp_replicate",), (4,)), batch=6)
    operators = read_operators(built, solution.assignment, Mesh(("dp_replicate",), (4,)))
    assert operators["up/mm#0"].axes != ("m",)


def test_the_same_program_gives_the_same_problem() -> None:
    first, second = (build(captured_mlp(), H100, Mesh(("inner",), (4,))).problem for _ in range(2))
    assert first.names == second.names
    for one, other in zip(first.edges, second.edges, strict=True):
        assert dataclasses.astuple(one)[:2] == dataclasses.astuple(other)[:2]
        assert np.array_equal(one.costs, other.costs)
