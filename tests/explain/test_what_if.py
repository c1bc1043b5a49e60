"""Earlier results and older plans: the same answers as without them, and what they spare."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import autopar
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh import query
from autopar.planner.one_mesh.warm_start import labels_like
from autopar.planner.problem.program_cache import Memo
from autopar.planner.solver import solve
from tests.planner.problems import Mlp, build, captured_mlp

CLUSTER = "4 H100-SXM"
INPUTS = (torch.randn(16, 64), torch.zeros(16, dtype=torch.long))


def test_a_memo_answers_equal_questions_once_and_forgets_the_oldest() -> None:
    memo: Memo[int] = Memo(2)
    asked: list[int] = []

    def answer(number: int) -> int:
        return memo.recall(number, lambda: asked.append(number) or number * 10)  # type: ignore[func-returns-value]

    assert [answer(n) for n in (1, 1, 2, 3, 1)] == [10, 10, 20, 30, 10]
    assert asked == [1, 2, 3, 1]


@pytest.mark.exhaustive
def test_a_planner_answers_as_plan_does() -> None:
    planner = autopar.Planner(Mlp(), INPUTS, cluster=CLUSTER)
    for question in ({}, {"constraints": {"up.weight": "R"}}, {"dims": {"tp": 4}}, {}):
        answer = planner.plan(**question)  # type: ignore[arg-type]
        alone = autopar.plan(Mlp(), INPUTS, cluster=CLUSTER, **question)  # type: ignore[arg-type]
        assert answer.objective_seconds == pytest.approx(alone.objective_seconds, rel=1e-9)
        assert answer.prices_hash == alone.prices_hash


def test_kernels_are_chosen_once_for_a_program_and_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(query, "cheaper_kernels", lambda program, backend, device: chosen.append(device.name) or ())
    planner = autopar.Planner(Mlp(), INPUTS, cluster=CLUSTER)
    for dims in ({"tp": 4}, {"dp_shard": 4}):
        planner.plan(dims=dims, mode="fast")
    planner.plan(dims={"tp": 4}, mode="fast", kernels=())
    assert len(chosen) == 1


def test_labels_of_a_plan_are_those_that_made_it() -> None:
    mesh = Mesh(("outer", "inner"), (2, 2))
    plan = autopar.plan(Mlp(), INPUTS, cluster=CLUSTER, mesh=(2, 2), with_baselines=False)
    built = build(captured_mlp(), Cluster.parse(CLUSTER), mesh)
    best = solve(built.problem)
    labels = labels_like(built, mesh, plan)
    assert labels is not None
    assert plan.parameters.keys() == {v.name for v in built.variables if v.kind == "parameter"}
    named = [i for i, v in enumerate(built.variables) if v.kind == "parameter"]
    for index in named:
        variable = built.variables[index]
        assert variable.labels[labels[index]].stored == plan.parameters[variable.name].stored
    assert np.isfinite(best.objective)


def test_an_unknown_operator_falls_to_the_cheapest_and_another_mesh_to_nothing() -> None:
    mesh = Mesh(("outer", "inner"), (2, 2))
    plan = autopar.plan(Mlp(), INPUTS, cluster=CLUSTER, mesh=(2, 2), with_baselines=False)
    built = build(captured_mlp(), Cluster.parse(CLUSTER), mesh)
    fewer = replace(plan, operators={}, parameters={})
    labels = labels_like(built, mesh, fewer)
    assert labels is not None
    assert len(labels) == len(built.variables)
    assert labels_like(built, Mesh(("inner",), (4,)), plan) is None


def test_a_plan_that_is_no_file_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the plan .*nowhere\.json"):
        autopar.plan(Mlp(), INPUTS, cluster=CLUSTER, warm_start="nowhere.json")


def test_a_search_without_time_returns_a_plan_with_its_bound_and_says_so() -> None:
    plan = autopar.plan(Mlp(), INPUTS, cluster=CLUSTER, time_limit=1e-3)
    assert 0.0 <= plan.bound_seconds <= plan.objective_seconds
    assert any(note.startswith("the time limit ended the search") for note in plan.notes)
