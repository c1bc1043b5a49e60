"""Plans travel: labels of a coarser mesh cost on the finer one what they cost before."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.mesh_shapes import parts_of
from autopar.planner.one_mesh.finer_plans import decisions, labels_on
from autopar.planner.solver import evaluate, is_forbidden, solve
from autopar.request.mesh_axes import FREE_AXIS_NAMES
from tests.planner.problems import build, captured_mlp

CLUSTER = Cluster.parse("2x8 H100-SXM")
TIES = 1e-4


def free(*shape: int) -> Mesh:
    return Mesh(FREE_AXIS_NAMES[len(shape)], shape)


@pytest.mark.exhaustive(sample="coarse0-fine0")
@pytest.mark.parametrize(
    ("coarse", "fine"), [((16,), (2, 8)), ((2, 8), (2, 2, 4)), ((4, 4), (2, 2, 4)), ((2, 2, 4), (2, 2, 2, 2))]
)
def test_a_plan_costs_the_same_on_the_finer_mesh(coarse: tuple[int, ...], fine: tuple[int, ...]) -> None:
    program = captured_mlp(batch=8192, width=4096)
    before = build(program, CLUSTER, free(*coarse))
    optimum = solve(before.problem)
    part_of = parts_of(free(*fine), free(*coarse), CLUSTER.devices_per_node)
    assert part_of is not None
    after = build(program, CLUSTER, free(*fine))
    made = decisions(before, optimum.assignment)
    labels = labels_on(after, free(*fine), made, part_of)
    objective = evaluate(after.problem, labels)[0]
    assert objective == pytest.approx(optimum.objective, rel=TIES)
    assert solve(after.problem, warm_start=labels).objective <= objective


def test_parts_in_the_wrong_order_cost_something_else() -> None:
    """The mutation that the test above must catch."""
    program = captured_mlp(batch=8192, width=4096)
    named = build(program, CLUSTER, Mesh(("dp_shard", "tp"), (2, 8)))  # its axes do different things
    optimum = solve(named.problem)
    made, fine = decisions(named, optimum.assignment), free(2, 2, 4)
    after = build(program, CLUSTER, fine)
    right, wrong = (evaluate(after.problem, labels_on(after, fine, made, p))[0] for p in ((0, 1, 1), (1, 0, 0)))
    assert right == pytest.approx(optimum.objective, rel=TIES)
    assert abs(wrong - right) > 10 * TIES * right


def test_labels_of_the_same_mesh_are_found_again_and_unknown_ones_fitted_to_their_neighbours() -> None:
    built = build(captured_mlp(batch=8192, width=4096), CLUSTER, free(2, 8))
    optimum = solve(built.problem)
    made = decisions(built, optimum.assignment)
    assert labels_on(built, free(2, 8), made, (0, 1)).tolist() == optimum.assignment.tolist()
    heavy = next(index for node, index in built.operators.items() if node in built.heavy)
    made[heavy] = (("nothing", "known"), *made[heavy][1:])
    assert not is_forbidden(np.asarray(evaluate(built.problem, labels_on(built, free(2, 8), made, (0, 1)))[0]))
