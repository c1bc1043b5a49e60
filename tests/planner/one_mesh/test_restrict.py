"""Restrict: what is left obeys the constraints at the old prices; conflicts are named, as small as they can be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh, Shard
from autopar.planner.one_mesh.restrict import ImpossiblePlacement, can_be_met, restricted, smallest_conflict
from autopar.planner.problem.build import Built
from autopar.planner.problem.constraint_targets import BoundConstraint, bind_constraints
from autopar.planner.problem.factorisation import Factorisation
from autopar.planner.solver import FORBIDDEN, solve
from autopar.request.constraints import parse_constraints
from tests.planner.problems import build, captured_mlp

CLUSTER, MESH = Cluster.parse("4 H100-SXM"), Mesh(("outer", "inner"), (2, 2))
PROGRAM = captured_mlp()


@pytest.fixture(scope="module")
def built() -> Built:
    return build(PROGRAM, CLUSTER, MESH)


def wishes(constraints: object) -> tuple[BoundConstraint, ...]:
    return bind_constraints(PROGRAM, parse_constraints(constraints), Factorisation(PROGRAM))


def test_nothing_to_obey_changes_nothing(built: Built) -> None:
    assert restricted(built, MESH, ()) is built


def test_every_choice_that_is_left_obeys(built: Built) -> None:
    narrow = restricted(built, MESH, wishes({"up.weight": {"inner": "S(0)"}, "down": {"outer": "R"}}))
    parameter = next(v for v in narrow.variables if v.name == "up.weight")
    assert {(label.stored[1], label.used[1]) for label in parameter.labels} == {(Shard(0), Shard(0))}
    assert len(parameter.costs) == len(parameter.labels)
    for edge in narrow.problem.edges:
        assert edge.costs.shape == (
            len(narrow.problem.node_costs[edge.source]),
            len(narrow.variables[edge.target].costs),
        )


def test_constraints_never_make_a_plan_cheaper_and_the_free_optimum_may_be_asked_for(built: Built) -> None:
    free = solve(built.problem).objective
    objectives = {
        text: solve(restricted(built, MESH, wishes({"up.weight": {"inner": text}})).problem).objective
        for text in ("R", "S(0)", "S(1)")
    }
    assert min(objectives.values()) >= free - 1e-15
    assert len(set(objectives.values())) == 3


def test_arrays_that_edges_share_stay_shared(built: Built) -> None:
    narrow = restricted(built, MESH, wishes({"up.weight": {"inner": "S(0)"}}))
    before = len({id(edge.costs) for edge in built.problem.edges})
    assert len({id(edge.costs) for edge in narrow.problem.edges}) <= before + 4


def test_a_placement_that_is_impossible_names_what_is_possible(built: Built) -> None:
    with pytest.raises(
        ImpossiblePlacement, match=r"up\.weight \(256, 64\) cannot be stored P\(sum\) on inner=2; it can be"
    ):
        restricted(built, MESH, wishes({"up.weight": {"inner": "P(sum)"}}))


def test_two_patterns_that_contradict_are_both_named_and_no_third(built: Built) -> None:
    asked = {"up.bias": "R", "up.*ight": {"inner": "S(0)"}, "*.weight": {"inner": "S(1)"}}
    with pytest.raises(InfeasibleError) as caught:
        restricted(built, MESH, wishes(asked))
    message = str(caught.value)
    assert "'up.*ight': S(0) on inner" in message
    assert "'*.weight': S(1) on inner" in message
    assert "up.bias" not in message


def test_the_deletion_filter_finds_a_smallest_set() -> None:
    """Against brute force over all subsets: no proper subset of what it returns conflicts."""
    names = wishes(dict.fromkeys(("up.weight", "up.bias", "down.weight", "down.bias"), "R"))
    conflicts = [{0, 2}, {1, 2, 3}]

    def possible(some: object) -> bool:
        taken = {names.index(wish) for wish in some}  # type: ignore[attr-defined]
        return not any(conflict <= taken for conflict in conflicts)

    found = smallest_conflict(names, possible)
    assert not possible(found)
    assert all(possible(part) for part in itertools.combinations(found, len(found) - 1))


def test_forbidden_pairs_between_neighbours_cannot_be_met(built: Built) -> None:
    """A mutation: with the only edge into an operator forbidden throughout, its constraint cannot be met."""
    asked = wishes({"up/mm#0": "R"})
    assert can_be_met(built, MESH, asked)
    target = built.operators[asked[0].targets[0].value[0]]
    edges = tuple(
        replace(edge, costs=np.full_like(edge.costs, FORBIDDEN)) if edge.target == target else edge
        for edge in built.problem.edges
    )
    broken = replace(built, problem=replace(built.problem, edges=edges))
    assert not can_be_met(broken, MESH, asked)
