"""Communication of parameters that counts less: only theirs, and shared tables stay shared."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.hidden_communication import gather_seconds, with_hidden
from autopar.planner.problem.build import Built
from autopar.planner.problem.prices import Prices
from autopar.planner.solver import evaluate, is_forbidden, solve
from autopar.program import Program
from tests.planner.problems import build, captured_mlp

CLUSTER = Cluster.parse("4x1 H100-SXM")
MESH, FREE = Mesh(("dp_shard",), (4,)), Mesh(("axis",), (4,))
"""FREE: a name that says nothing, so that parameters may be gathered once and kept, too."""


@pytest.fixture(scope="module")
def program() -> Program:
    return captured_mlp(batch=8192, width=1024)


@pytest.fixture(scope="module")
def built(program: Program) -> Built:
    return build(program, CLUSTER, MESH, None)


@pytest.fixture(scope="module")
def free(program: Program) -> Built:
    return build(program, CLUSTER, FREE, None)


def of_parameters(built: Built) -> list[bool]:
    kinds = [variable.kind for variable in built.variables]
    return ["parameter" in (kinds[edge.source], kinds[edge.target]) for edge in built.problem.edges]


def test_only_tables_of_parameters_shrink(free: Built) -> None:
    half = with_hidden(free, 0.5, Prices(CLUSTER, FREE))
    shrunk = gathered = 0
    for edge, other, of_one in zip(free.problem.edges, half.problem.edges, of_parameters(free), strict=True):
        allowed = ~is_forbidden(edge.costs)
        share = 0.5 if of_one else 1.0
        np.testing.assert_allclose(other.costs[allowed], share * edge.costs[allowed], rtol=1e-12)
        assert np.array_equal(is_forbidden(other.costs), ~allowed)
        shrunk += bool(of_one and edge.costs[allowed].any())
    assert shrunk > 0
    for variable, other in zip(free.variables, half.variables, strict=True):
        if variable.kind != "parameter":
            assert other.costs is variable.costs
        else:  # a gather that is kept is in the costs of the label; what the optimizer does is, too, and stays
            kept = np.array([label.keep_gathered for label in variable.labels])
            assert (other.costs[kept] < variable.costs[kept]).all()
            np.testing.assert_array_equal(other.costs[~kept], variable.costs[~kept])
            gathered += int(kept.sum())
    assert gathered > 0


@pytest.mark.parametrize("count", [1, 4])
def test_every_micro_batch_gathers_once(free: Built, count: int) -> None:
    prices = Prices(CLUSTER, FREE)
    half = with_hidden(free, 0.5, prices, count)
    total = 0.0
    for variable, other in zip(free.variables, half.variables, strict=True):
        if variable.kind == "parameter":
            taken_off = 0.5 * count * gather_seconds(variable, prices)
            np.testing.assert_allclose(variable.costs - other.costs, taken_off, rtol=1e-9, atol=1e-15)
            total += taken_off.sum()
    assert total > 1e-5


def test_tables_that_were_shared_still_are(built: Built) -> None:
    half = with_hidden(built, 0.5, Prices(CLUSTER, MESH))
    distinct = {id(edge.costs) for edge in built.problem.edges}
    assert len({id(edge.costs) for edge in half.problem.edges}) <= 2 * len(distinct)
    assert len({id(costs) for costs in half.problem.node_costs}) <= len({id(c) for c in built.problem.node_costs})


def test_the_optimum_falls_with_the_share_and_is_concave(built: Built) -> None:
    """The minimum of sums that are linear in the share."""
    shares = (0.0, 0.25, 0.5, 0.75)
    optima = [solve(with_hidden(built, share, Prices(CLUSTER, MESH)).problem).objective for share in shares]
    steps = np.diff(optima)
    assert (steps <= 1e-12).all()
    assert steps.min() < 0
    assert (np.diff(steps) <= 1e-12).all()


def test_no_share_is_the_problem_itself(built: Built) -> None:
    labels = solve(built.problem).assignment
    same = with_hidden(built, 0.0, Prices(CLUSTER, MESH))
    assert evaluate(same.problem, labels)[0] == pytest.approx(evaluate(built.problem, labels)[0], rel=1e-12)
