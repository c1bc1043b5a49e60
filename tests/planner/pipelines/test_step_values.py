"""What a stage that gathers once holds of a parameter, counted by hand for one that is stored in parts."""

from __future__ import annotations

import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.pipelines.step_values import StepValues
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.problem.prices import tensor_bytes
from autopar.planner.solver import solve
from tests.planner.problems import build, captured_mlp


def test_a_gathered_weight_is_held_whole_beyond_its_block() -> None:
    program, mesh = captured_mlp(batch=4096), Mesh(("dp_shard",), (2,))
    built = build(program, Cluster.parse("2 H100-SXM"), mesh)
    step = StepValues(built, solve(built.problem).assignment, Lifetimes(program), mesh)
    weights = {v.name: i for i, v in enumerate(built.variables) if v.kind == "parameter" and len(shape_of(v.node)) > 1}
    assert set(weights) == {"up.weight", "down.weight"}
    for index in weights.values():
        whole = tensor_bytes(built.variables[index].node)
        assert step.held_bytes(index) == pytest.approx(1.5 * whole)  # and the half of its gradient that others own
