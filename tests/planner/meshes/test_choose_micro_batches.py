"""How many parts are tried: as long as some mesh may still be better than the best answer so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.layouts.placement import Mesh
from autopar.planner.meshes import choose_micro_batches as module
from autopar.planner.meshes.choose_mesh import Chosen
from autopar.planner.one_mesh.query import NO_DEADLINE

MESH = Mesh(("tp",), (8,))
DATA = Mesh(("dp_shard",), (8,))


class Parts:
    """Plans of 10 s in one part, of 8 s in two, where a mesh costs at least 6 s in any number. steps: as played."""

    def __init__(self, steps: tuple[float, float]) -> None:
        self.asked: list[float] = []
        self._steps = steps

    def __call__(
        self,
        query: Any,
        meshes: Sequence[Mesh],
        floors: Mapping[Mesh, float] | None = None,
        below: float = math.inf,
        contender: object = None,
    ) -> Chosen:
        self.asked.append(below)
        seconds = 10.0 if query.micro is None else 8.0
        predicted = SimpleNamespace(step_seconds=self._steps[query.micro is not None])
        plan = SimpleNamespace(objective_seconds=seconds, predicted=predicted)
        best: Any = SimpleNamespace(plan=plan) if seconds < below else None
        return Chosen(best=best, failures=(), free_bounds={MESH: 6.0})


def chosen(
    monkeypatch: pytest.MonkeyPatch, rival: float | None, steps: tuple[float, float] = (9.0, 7.0)
) -> tuple[Chosen, list[float]]:
    recapture = SimpleNamespace(at_batch=lambda size: pytest.fail("captured"))
    query: Any = SimpleNamespace(micro=None, micro_batches=None, recapture=recapture)
    two = SimpleNamespace(micro=SimpleNamespace(count=2), shards=None, deadline=SimpleNamespace(left=lambda: 1.0))
    monkeypatch.setattr(module, "micro_batch_queries", lambda *_: iter([two]))
    choose = Parts(steps)
    monkeypatch.setattr(module, "choose_mesh", choose)
    monkeypatch.setattr(module, "Plain", SimpleNamespace(of=lambda plan: plan))
    contender: Any = None if rival is None else SimpleNamespace(step_before=lambda work, plain: rival)
    found = module.choose_micro_batches(query, [MESH], contender)
    return found, choose.asked


def objective(found: Chosen) -> float:
    assert found.best is not None
    return found.best.plan.objective_seconds


def test_more_parts_must_beat_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = chosen(monkeypatch, None)
    assert objective(found) == 8.0
    assert asked == [math.inf, 10.0]


def test_of_one_part_and_more_the_shorter_played_step_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = chosen(monkeypatch, None, (6.9, 7.0))
    assert objective(found) == 10.0
    assert asked == [math.inf, 10.0]


@pytest.mark.parametrize(("rival", "wanted"), [(9.5, 8.0), (9.1, 8.0)])
def test_more_parts_must_beat_another_answer_too(monkeypatch: pytest.MonkeyPatch, rival: float, wanted: float) -> None:
    found, asked = chosen(monkeypatch, rival)
    assert objective(found) == wanted
    assert asked == [math.inf, rival]


def test_what_is_slower_than_another_answer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMITS", replace(module.LIMITS, parts_must_promise=1.0))
    found, asked = chosen(monkeypatch, 7.0)
    assert objective(found) == 10.0
    assert asked == [math.inf, 7.0]


@pytest.mark.parametrize("rival", [5.0, 8.0])
def test_none_are_tried_where_another_answer_is_near_every_bound(monkeypatch: pytest.MonkeyPatch, rival: float) -> None:
    found, asked = chosen(monkeypatch, rival)
    assert objective(found) == 10.0
    assert asked == [math.inf]


@pytest.mark.parametrize("steps", [(3.0, 2.0), (2.0, 3.0)])
def test_of_gathers_per_part_and_per_step_the_shorter_step_counts(
    monkeypatch: pytest.MonkeyPatch, steps: tuple[float, float]
) -> None:
    @dataclass(frozen=True)
    class Asked:
        micro: str = "two parts"
        gather_once: bool = False
        shards: None = None
        deadline: object = NO_DEADLINE

    def choose(query: Any, *_: object) -> Chosen:
        predicted = SimpleNamespace(step_seconds=steps[query.gather_once])
        best: Any = SimpleNamespace(plan=SimpleNamespace(predicted=predicted, gather_once=query.gather_once))
        return Chosen(best=best, failures=(), free_bounds={DATA: steps[query.gather_once]})

    monkeypatch.setattr(module, "choose_mesh", choose)
    found = module._both_ways(Asked(), [DATA])  # type: ignore[arg-type]
    assert found.best is not None
    assert found.best.plan.gather_once == (steps[1] < steps[0])
    assert found.free_bounds == {DATA: 2.0}
