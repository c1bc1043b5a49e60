"""Play a pipeline schedule: stages x schedule -> step seconds, bubble, memory over time, exposed communication.

Every pass starts when its rank is free and its input has arrived; an input leaves when the pass that makes it has ended
and the sender's wire is free, and travels `send_seconds`. Four equal stages, 8 micro-batches, 1F1B:

    stages = [StageCosts(forward_seconds=1.0, backward_seconds=2.0)] * 4
    play_pipeline(stages, build_schedule("1f1b", 4, 8)).step_seconds           # 33.0 = (8 + 4 - 1) (1 + 2)

No formula stands behind it, so stages may differ (embedding and head), transfers may block their sender, ranks may hold
several chunks. `pipeline_program` makes the same step a program of the simulator, for traces and for overlap inside of
passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from autopar.cost_models.chrome_trace import MemoryEvent
from autopar.cost_models.stage_costs import StageCosts
from autopar.errors import ConfigurationError
from autopar.schedules.actions import Kind, Schedule, receiver
from autopar.schedules.check import runnable_order
from autopar.schedules.list_scheduler import FAMILIES, TIMED_FAMILIES, StageTimes, build_schedule, list_schedule

StepEnd: TypeAlias = Literal["together", "each", "flowing"]
"""When a rank's `once_seconds` begin. together: all ranks have ended (a global gradient norm needs all gradients);
each: its own last backward has; flowing: so, and the rank goes on with the next step while others end this one
(post-validation of the optimizer, arXiv 2401.10241), so that a step costs what the slowest rank is occupied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """One step of a pipeline; lists are per rank."""

    schedule: Schedule
    stages: tuple[StageCosts, ...]
    step_seconds: float
    span_seconds: tuple[float, ...]
    """From the rank's first forward to the end of its last pass."""
    compute_seconds: tuple[float, ...]
    exposed_communication_seconds: tuple[float, ...]
    """Waiting while the input travels, and sending where that blocks."""
    start_seconds: tuple[tuple[float, ...], ...]
    """Of every action, in the rank's order."""

    @property
    def bubble_rate(self) -> float:
        """Part of the longest rank's span in which the ranks, on average, do not compute; without `once_seconds`.

        For equal stages this is (cost - m (F + B + W)) / cost of arXiv 2401.10241.
        """
        return 1.0 - sum(self.compute_seconds) / (len(self.span_seconds) * max(self.span_seconds))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most that each rank holds at once: states, saved activations and transients."""
        return tuple(max(live for _, live in self.memory_over_time(rank)) for rank in range(len(self.schedule.ranks)))

    def memory_over_time(self, rank: int) -> list[MemoryEvent]:
        """(seconds, bytes from then on) at the start and the end of each of the rank's actions, and where its
        parameters are updated."""
        actions = self.schedule.ranks[rank]
        live = sum(self.stages[stage].state_bytes for stage in {action.stage for action in actions})
        live += sum(self.stages[a.stage].saved_bytes for a in actions if a.micro_batch < 0)
        events: list[MemoryEvent] = [(0.0, live)]
        for action, start in zip(actions, self.start_seconds[rank], strict=True):
            stage = self.stages[action.stage]
            allocates, frees = pass_bytes(stage, action.kind)
            events.append((start, live + allocates))
            live += allocates - frees
            events.append((start + pass_seconds(stage)[action.kind], live))
        update = sum(self.stages[stage].update_bytes for stage in {action.stage for action in actions})
        return [*events, (events[-1][0], live + update), (events[-1][0], live)] if update else events


def schedule_for(
    family: str, stages: Sequence[StageCosts], num_ranks: int, micro_batches: int, send_seconds: float = 0.0
) -> Schedule:
    """The schedule of a family for these stages: at their times and bytes where the family depends on them.

    Raises ConfigurationError where the stages cannot be dealt out evenly.
    """
    chunks, rest = divmod(len(stages), num_ranks)
    if rest or not chunks:
        raise ConfigurationError(f"{len(stages)} stages on {num_ranks} ranks: each rank needs as many chunks")
    if family not in TIMED_FAMILIES:
        return build_schedule(family, num_ranks, micro_batches, chunks)
    times = StageTimes(
        forward=tuple(stage.forward_seconds for stage in stages),
        backward=tuple(stage.backward_seconds for stage in stages),
        weight=tuple(stage.weight_seconds for stage in stages),
        send=(send_seconds,) * (len(stages) - 1),
    )
    saved = max(stage.saved_bytes for stage in stages)
    share = max(stage.weight_saved_bytes for stage in stages) / saved if saved else 1.0
    return list_schedule(FAMILIES[family], num_ranks, micro_batches, chunks, times, weight_share=min(1.0, share))


def play_pipeline(
    stages: Sequence[StageCosts],
    schedule: Schedule,
    *,
    send_seconds: Sequence[float] | float = 0.0,
    near: Collection[int] = (),
    blocking: bool = False,
    step_end: StepEnd = "each",
) -> StepCosts:
    """Time one step; `stages` in the order of the model, `send_seconds` from each to the next (and back).

    near: borders inside of a node. A rank has a wire to its own node and one to the others, and what it sends over one,
    activations to the next stage and gradients to the one before, goes one after the other.
    Stages on one rank hand over at no cost. `blocking`: the sender computes on only when its transfer has ended.
    Raises ConfigurationError where stages and schedule do not fit, or ranks wait for each other.
    """
    if len(stages) != schedule.num_stages:
        raise ConfigurationError(f"{len(stages)} stages, but the schedule has {schedule.num_stages}")
    seconds = [pass_seconds(stage) for stage in stages]
    travel = send_list(send_seconds, len(stages))
    num_ranks = len(schedule.ranks)
    clock, exposed, computed = [0.0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    starts: list[list[float]] = [[] for _ in range(num_ranks)]
    ends: list[float] = []
    arrivals: list[float] = []
    wire_free: dict[tuple[int, bool], float] = defaultdict(float)
    links = _links(schedule)
    last = {(rank, stage): place for place, (rank, stage, kind, *_) in enumerate(links) if kind != "F"}
    for place, (rank, stage, kind, needed, target, edge) in enumerate(links):
        start = clock[rank]
        if needed >= 0 and arrivals[needed] > start:
            exposed[rank] += arrivals[needed] - max(start, ends[needed])
            start = arrivals[needed]
        starts[rank].append(start)
        length = seconds[stage][kind] + (stages[stage].last_seconds if last.get((rank, stage)) == place else 0.0)
        computed[rank] += length
        end = arrival = start + length
        if target >= 0:
            wire = rank, edge in near
            arrival = wire_free[wire] = max(end, wire_free[wire]) + travel[edge]
        ends.append(end)
        arrivals.append(arrival)
        clock[rank] = arrival if blocking else end
        exposed[rank] += clock[rank] - end
    spans = [end - first[0] for end, first in zip(clock, starts, strict=True)]
    return StepCosts(
        schedule=schedule,
        stages=tuple(stages),
        step_seconds=_step_seconds(stages, schedule, clock, spans, step_end),
        span_seconds=tuple(spans),
        compute_seconds=tuple(computed),
        exposed_communication_seconds=tuple(exposed),
        start_seconds=tuple(tuple(times) for times in starts),
    )


@lru_cache(maxsize=32)
def _links(schedule: Schedule) -> tuple[tuple[int, int, Kind, int, int, int], ...]:
    """(rank, stage, kind, position of the pass it waits for, rank it sends to, edge it sends on) of every pass.

    In an order in which every pass stands behind what it needs; edge s lies between stages s and s + 1; -1: none.
    """
    num_stages = schedule.num_stages
    position: dict[tuple[int, str, int], int] = {}
    links: list[tuple[int, int, Kind, int, int, int]] = []
    for rank, action in runnable_order(schedule):
        stage, kind, micro_batch = action
        needed = schedule.awaited(action)
        before = -1 if needed is None else position[(*needed, micro_batch)]
        target = receiver(action, num_stages)
        if kind != "W":
            position[stage, "F" if kind == "F" else "gradient", micro_batch] = len(links)
        peer, edge = -1, -1
        if target is not None and schedule.rank_of(target, micro_batch) != rank:
            peer, edge = schedule.rank_of(target, micro_batch), min(stage, target)
        links.append((rank, stage, kind, before, peer, edge))
    return tuple(links)


def _step_seconds(
    stages: Sequence[StageCosts], schedule: Schedule, ends: Sequence[float], spans: Sequence[float], step_end: StepEnd
) -> float:
    once = [0.0] * len(schedule.ranks)
    for stage, ranks in zip(stages, schedule.holders, strict=True):
        for rank in ranks:
            once[rank] += stage.once_seconds
    if step_end == "together":
        return max(ends) + max(once)
    occupied = ends if step_end == "each" else spans
    return max(seconds + last for seconds, last in zip(occupied, once, strict=True))


def send_list(send_seconds: Sequence[float] | float, num_stages: int) -> list[float]:
    """Seconds from each stage to the next, from one number or one for each."""
    sends = [send_seconds] * (num_stages - 1) if isinstance(send_seconds, (int, float)) else list(send_seconds)
    if len(sends) != num_stages - 1:
        raise ConfigurationError(f"{len(sends)} transfers between {num_stages} stages; there are {num_stages - 1}")
    return sends


def pass_seconds(stage: StageCosts) -> Mapping[Kind, float]:
    """Seconds of each kind of pass."""
    return {
        "F": stage.forward_seconds,
        "B": stage.backward_seconds + stage.weight_seconds,
        "I": stage.backward_seconds,
        "W": stage.weight_seconds,
    }


def pass_bytes(stage: StageCosts, kind: Kind) -> tuple[float, float]:
    """What a pass takes at its start and gives back at its end.

    What W keeps is a part of what F saved, or of the transients of I.
    """
    if kind == "F":
        return stage.saved_bytes + stage.forward_extra_bytes, stage.forward_extra_bytes
    if kind == "W":
        return 0.0, stage.weight_saved_bytes
    if kind == "B":
        return stage.extra_of_whole_backward, stage.extra_of_whole_backward + stage.saved_bytes
    return stage.backward_extra_bytes, stage.backward_extra_bytes + stage.saved_bytes - stage.weight_saved_bytes
