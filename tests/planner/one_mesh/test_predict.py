"""Predict: the simulated step hides nothing that the lowering does not hide, and pays what it emits."""

from __future__ import annotations

import dataclasses

import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.predict import predict_timeline
from autopar.planner.problem.prices import Prices
from autopar.planner.solver import solve
from autopar.request.constraints import Constraints
from tests.planner.problems import build, captured_mlp

CLUSTER = Cluster.parse("1x8 H100-SXM")


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "tp"])
def test_all_communication_is_exposed_and_every_edge_of_an_unshared_value_is_paid(axis: str) -> None:
    program, mesh = captured_mlp(batch=4096, width=2048), Mesh((axis,), (8,))
    built = build(program, CLUSTER, mesh, Constraints())
    solution = solve(built.problem)
    timeline = predict_timeline(program, built, solution.assignment, Prices(CLUSTER, mesh))
    edges = [
        (built.variables[edge.source].kind, float(edge.costs[tuple(solution.assignment[[edge.source, edge.target]])]))
        for edge in built.problem.edges
    ]
    unshared = sum(seconds for kind, seconds in edges if kind != "copy" and seconds >= 1e-7)
    communication = sum(action.seconds for action in timeline.actions if action.communication)
    assert 0.0 < unshared <= communication * (1 + 1e-12)
    assert timeline.exposed_communication_seconds == pytest.approx(communication)
    assert timeline.makespan_seconds == pytest.approx(sum(action.seconds for action in timeline.actions))
    assert timeline.makespan_seconds <= solution.objective * (1 + 1e-9)


def test_equal_redistributions_of_an_unshared_value_are_all_paid() -> None:
    program, mesh = captured_mlp(batch=4096, width=2048), Mesh(("dp_replicate",), (8,))
    built = build(program, CLUSTER, mesh, Constraints())
    solution = solve(built.problem)
    source = next(edge.source for edge in built.problem.edges if built.variables[edge.target].kind == "parameter")
    doubled = [edge for edge in built.problem.edges if edge.source == source]
    problem = dataclasses.replace(built.problem, edges=(*built.problem.edges, *doubled))
    twice = dataclasses.replace(built, problem=problem)
    seconds = [
        predict_timeline(program, b, solution.assignment, Prices(CLUSTER, mesh)).makespan_seconds
        for b in (built, twice)
    ]
    reductions = sum(float(e.costs[tuple(solution.assignment[[e.source, e.target]])]) for e in doubled)
    assert seconds[1] == pytest.approx(seconds[0] + reductions)
