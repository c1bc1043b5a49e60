"""Where memory is short, the plan whose communication of parameters hides is found before others are fitted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.meshes import hidden_first
from autopar.planner.meshes.choose_mesh import Chosen, choose_mesh
from autopar.planner.meshes.contenders import Plain, Work
from autopar.planner.meshes.hidden_first import HiddenFirst
from autopar.planner.one_mesh import mesh_plan
from autopar.planner.one_mesh.mesh_plan import Candidate
from autopar.planner.one_mesh.query import Query
from autopar.planner.planning import make_plan
from autopar.planner.problem.limits import LIMITS
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from tests.planner.problems import captured_mlp, free_query

MESH = Mesh(("outer", "inner"), (2, 4))
CLUSTER = Cluster.parse("8 H100-SXM")


class Block(nn.Module):
    """forward(x (rows, width)) -> (rows, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Deep(nn.Sequential):
    """forward(x (rows, width)) -> a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def deep(width: int, blocks: int, rows: int) -> Program:
    with torch.device("meta"):
        return capture(Deep(*(Block(width) for _ in range(blocks))), (torch.empty(rows, width),), {})


@pytest.fixture(scope="module")
def query() -> Query:
    return free_query(captured_mlp(batch=64, width=64), CLUSTER, "fast")


@pytest.fixture(scope="module")
def candidate(query: Query) -> Candidate:
    best = choose_mesh(query, [Mesh(("inner",), (8,))]).best
    assert best is not None
    return best


def taking(candidate: Candidate, step_seconds: float) -> Candidate:
    predicted = replace(candidate.plan.predicted, step_seconds=step_seconds)
    return replace(candidate, plan=replace(candidate.plan, predicted=predicted))


class Other:
    """A contender that takes so long, and remembers what it was to beat."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked, self.played = seconds, list[tuple[Work, float]](), None

    def step_before(self, work: Work, plain: Plain | None) -> float:
        assert plain is not None
        self.asked.append((work, plain.seconds))
        return self.seconds


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, candidate: Candidate) -> list[Any]:
    """What was searched under other sums: each search finds a step of half a second."""
    found: list[Any] = []

    class Sums:
        def __init__(self, query: Query, bounds: Any) -> None:
            self.bounds = bounds

        def shortest(self, shares: Any, *rest: object) -> Candidate:
            plan = next((each for each in found if isinstance(each, Plan)), candidate.plan)
            found.append((shares, dict(self.bounds)))
            return taking(replace(candidate, plan=plan), 0.5)

    monkeypatch.setattr(hidden_first, "OtherSums", Sums)
    return found


def test_it_looks_once_and_only_where_memory_is_short(query: Query, looks: list[Any]) -> None:
    contender, plain = HiddenFirst(query, None), Plain(seconds=0.8, bounds={MESH: 0.7})
    assert contender.step_before("finer meshes", plain) == math.inf
    assert contender.step_before("more parts", None) == math.inf
    assert looks == []
    works: tuple[Work, ...] = ("finer meshes", "fitting", "fitting", "more parts")
    short = replace(plain, is_short=True)
    assert [contender.step_before(work, short) for work in works] == [0.5] * 4
    assert looks == [(LIMITS.shares_under_memory[:1], {MESH: 0.7})]


def test_another_share_is_tried_where_the_step_shows_what_the_sum_left_out(
    query: Query, candidate: Candidate, looks: list[Any]
) -> None:
    """What is found of every search has the sum of `candidate`, in which next to nothing hides."""
    hidden = replace(candidate.plan, hidden_share=0.9, objective_seconds=0.4)
    looks.append(hidden)
    HiddenFirst(query, None).step_before("fitting", Plain(seconds=0.8, is_short=True))
    assert [shares for shares, _ in looks[1:]] == [(share,) for share in LIMITS.shares_under_memory]


@pytest.mark.parametrize(("plain_seconds", "other_seconds"), [(0.8, 0.4), (0.8, 0.6), (0.3, 0.4)])
def test_another_contender_must_beat_what_was_found(
    query: Query, looks: list[Any], plain_seconds: float, other_seconds: float
) -> None:
    other = Other(other_seconds)
    seconds = HiddenFirst(query, other).step_before("fitting", Plain(seconds=plain_seconds, is_short=True))
    assert seconds == min(0.5, other_seconds)
    assert other.asked == [("fitting", min(0.5, plain_seconds))]


@pytest.mark.parametrize(("plain_seconds", "is_taken"), [(None, True), (0.8, True), (0.4, False)])
def test_the_shorter_step_is_chosen(
    query: Query, candidate: Candidate, looks: list[Any], plain_seconds: float | None, is_taken: bool
) -> None:
    plain = Chosen(best=None if plain_seconds is None else taking(candidate, plain_seconds), failures=())
    contender = HiddenFirst(query, None)
    assert contender.better_of(plain) is plain, "it did not look"
    contender.step_before("fitting", Plain(seconds=0.8, is_short=True))
    chosen = contender.better_of(plain)
    assert (chosen is plain) == (not is_taken)
    assert chosen.best is not None
    assert chosen.best.plan.predicted.step_seconds == (0.5 if is_taken else plain_seconds)


def test_a_short_limit_is_met_without_the_detour_of_the_plain_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks in 403 MiB a rank: gathers hide, and what is saved for them is not made again."""
    program = deep(1024, 2, 32768)

    def planned() -> Plan:
        return make_plan(program, Request(cluster=CLUSTER, memory_limit="403MiB", mode="fast"))

    plan = planned()
    assert plan.hidden_share in LIMITS.shares_under_memory
    assert plan.predicted.peak_bytes <= 403 * 2**20
    assert any("communication of parameters" in note for note in plan.notes)
    monkeypatch.setattr(hidden_first.OtherSums, "shortest", lambda *given: None)
    assert planned().predicted.step_seconds > 1.02 * plan.predicted.step_seconds


def test_room_is_left_for_early_gathers_where_they_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks in 160 MiB over slow links: a plan that fills the limit leaves no gather room to begin early."""
    program, cluster = deep(1024, 2, 4096), Cluster.parse("4x1 H100-SXM")

    def planned() -> Plan:
        return make_plan(program, Request(cluster=cluster, mesh=(2, 2), memory_limit="159.8MiB", mode="fast"))

    plan = planned()
    assert plan.hidden_share in LIMITS.shares_under_memory
    monkeypatch.setattr(mesh_plan, "shows_beyond", lambda plan: False)
    assert planned().predicted.step_seconds > 1.05 * plan.predicted.step_seconds
