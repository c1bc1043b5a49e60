"""Ranks that are delayed at random end every step, in every family of schedules: nobody waits in a circle.

Every rank is the list of what it starts and waits for, read off the graphs that it runs: collectives join in the order
in which each rank of a group starts them, and end when all have; values arrive when they were sent. Who goes on next is
drawn.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from torch import fx

from autopar.graphs.collective_nodes import WAIT, group_of
from autopar.passes.lowering.chain import step_to_run
from autopar.passes.lowering.stage import LoweredStage, LoweredStep
from autopar.plans.parallel_plan import Plan
from autopar.program import returned_values
from autopar.schedules.actions import PipeAction
from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import gathering_once, pipeline_plan, plan_of_stages
from tests.simulated_ranks import group_ranks

MICRO_BATCHES = 4


class Event(NamedTuple):
    """key: of a message, or of a collective on this rank; group: the ranks that start it, or send what is received;
    what: the collective."""

    kind: str
    key: object
    group: tuple[int, ...] = ()
    what: str = ""


def events(step: LoweredStep, plan: Plan, rank: int) -> Iterator[Event]:
    """What a rank does in a step, as `PipelineRun.actions` does it."""
    mine = plan.group_of(rank)
    stages = {stage.number: stage for stage in step.stages}
    actions = step.schedule.ranks[mine]
    last = {action.stage: action for action in actions if action.kind != "F"}
    for action in actions:
        stage, ends = stages[action.stage], last[action.stage] == action
        yield from _messages(step, action, plan, mine, received=True)
        yield from _collectives(_graph(stage, action, ends), str(action), plan, rank)
        yield from _messages(step, action, plan, mine, received=False)
        if ends and stage.last is None and stage.late is not None:
            yield from _collectives(stage.late.reduce.graph, f"sums of {action.stage}", plan, rank)
    for number, action in last.items():
        ending, late = stages[number].ending, stages[number].late
        if ending is not None and late is not None:
            last_pass = stages[number].last
            name = str(action) if last_pass is not None else f"sums of {number}"
            for node in returned_values((last_pass or late.reduce).graph):
                yield from [Event("wait", (name, node.name))] if group_of(node) else []


def _graph(stage: LoweredStage, action: PipeAction, ends: bool) -> fx.Graph:
    parts, halves = stage.partition, stage.halves
    if action.kind == "F":
        return parts.forward.graph
    assert halves is not None
    if ends and stage.last is not None:
        return stage.last.graph
    return {"B": halves.whole, "I": halves.inputs, "W": halves.weights}[action.kind].graph


def _collectives(graph: fx.Graph, name: str, plan: Plan, rank: int) -> Iterator[Event]:
    place = rank - plan.rank_groups[plan.group_of(rank)].first_rank
    for node in graph.nodes:
        symbol = group_of(node)
        if symbol is not None:
            ranks = tuple(other - place + rank for other in group_ranks(symbol, place, plan.layout_mesh))
            yield Event("start", (name, node.name), ranks, f"{node.target} of {node.meta['local_shape']} in {name}")
        elif node.target is WAIT:
            yield Event("wait", (name, node.all_input_nodes[0].name))


def _messages(step: LoweredStep, action: PipeAction, plan: Plan, mine: int, *, received: bool) -> Iterator[Event]:
    if action.kind == "W":
        return
    backward = action.kind != "F"
    find = step.cut.crossings_into if received else step.cut.crossings_from
    for crossing in find(action.stage, backward):
        other = step.schedule.rank_of(crossing.source if received else crossing.target, action.micro_batch)
        if other != mine:
            key = crossing.name, crossing.target, action.micro_batch
            group = plan.rank_groups[other]
            ranks = tuple(range(group.first_rank, group.first_rank + group.size))
            yield Event("receive" if received else "send", key, ranks)


@dataclass
class Ranks:
    """Ranks that go on as drawn."""

    programs: list[list[Event]]
    place: list[int] = field(default_factory=list)
    started: dict[tuple[int, tuple[int, ...]], list[Event]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[object, set[int]] = field(default_factory=lambda: defaultdict(set))

    def stuck(self, seed: int) -> list[str]:
        """At what ranks wait in the end; nothing where all of them have ended."""
        draw, self.place = random.Random(seed), [0] * len(self.programs)
        self.started.clear()
        self.sent.clear()
        while ready := [rank for rank in range(len(self.programs)) if self._may_go_on(rank)]:
            rank = draw.choice(ready)
            for _ in range(draw.choice((1, 1, 20))):
                if self._may_go_on(rank):
                    self._go_on(rank)
        left = [(rank, self._next(rank)) for rank in range(len(self.programs))]
        return [f"rank {rank} at {event.kind} {event.key}" for rank, event in left if event is not None]

    def _next(self, rank: int) -> Event | None:
        program = self.programs[rank]
        return program[self.place[rank]] if self.place[rank] < len(program) else None

    def _may_go_on(self, rank: int) -> bool:
        event = self._next(rank)
        if event is None:
            return False
        if event.kind == "receive":
            return self.sent[event.key].issuperset(event.group)  # of all ranks, though one may send it all
        return event.kind != "wait" or self._has_ended(rank, event.key)

    def _has_ended(self, rank: int, key: object) -> bool:
        """Whether all ranks of its group have started a collective, and the same one."""
        group, number = next(
            (group, place)
            for (starter, group), all_of_them in self.started.items()
            for place, event in enumerate(all_of_them)
            if starter == rank and event.key == key
        )
        others = [self.started[other, group][number : number + 1] for other in group]
        return all(others) and len({each[0].what for each in others}) == 1

    def _go_on(self, rank: int) -> None:
        event = self._next(rank)
        assert event is not None
        self.place[rank] += 1
        if event.kind == "start":
            self.started[rank, event.group].append(event)
        elif event.kind == "send":
            self.sent[event.key].add(rank)


def programs_of(plan: Plan, name: str) -> list[list[Event]]:
    micro, _ = plan_of_stages(name, MICRO_BATCHES, {"tp": 1})
    return [list(events(step_to_run(micro, plan, rank), plan, rank)) for rank in range(plan.num_ranks)]


def plan_of(schedule: str, dims: dict[str, int], *, once: bool = False, chunks: int = 1) -> Plan:
    blocks = CASES["skips"].halves if chunks == 1 else CASES["skips"].quarters
    plan = pipeline_plan("skips", blocks, schedule, MICRO_BATCHES, dims, chunks).with_(bucket_bytes={})
    return gathering_once(plan) if once else plan


@pytest.mark.parametrize("dims", [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)]
)
def test_delayed_ranks_end_every_step(schedule: str, chunks: int, dims: dict[str, int]) -> None:
    programs = programs_of(plan_of(schedule, dims, chunks=chunks, once="dp_shard" in dims), "skips")
    assert any(event.kind == "start" for program in programs for event in program)
    for seed in range(20):
        assert not Ranks(programs).stuck(seed)


def test_a_rank_that_starts_in_another_order_is_noticed() -> None:
    programs = programs_of(plan_of("1f1b", {"dp_replicate": 2}), "skips")
    starts = [place for place, event in enumerate(programs[0]) if event.kind == "start"]
    first, second = starts[:2]
    programs[0][first], programs[0][second] = programs[0][second], programs[0][first]
    assert Ranks(programs).stuck(0)
