"""A free search for a schedule: when each pass starts, so that the step is shortest and memory is kept (CP-SAT).

    start[s, F, j] + F_s + send <= start[s + 1, F, j]           inputs arrive
    passes of one rank do not overlap
    sum over micro-batches between F and I of their bytes, and between I and W of what W keeps, <= limit of the rank
    minimise the end of the last pass

A schedule of the list scheduler is where it begins. Micro-batches are alike, so every stage takes them in order.
Seconds are counted in whole units, rounded down, so the bound is one of the real problem; what is found is an order,
played at the real times, and never worse than where it began. Useful for some hundred passes; families are for more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortools.sat.python import cp_model

from autopar.errors import ConfigurationError
from autopar.schedules.actions import Kind, PipeAction, Schedule, producer
from autopar.schedules.check import runnable_order
from autopar.schedules.list_scheduler import StageTimes
from autopar.schedules.searched import PassMemory, Searched

UNITS = 10_000
"""Of the first schedule's length."""
BYTE_UNITS = 100_000
"""Of a rank's limit."""


def length_of(schedule: Schedule, times: StageTimes) -> float:
    """Seconds until the last pass ends."""
    return max((start + seconds_of(action, times) for action, start in starts_of(schedule, times).items()), default=0.0)


def starts_of(schedule: Schedule, times: StageTimes) -> dict[PipeAction, float]:
    """When each pass starts if none waits longer than it must."""
    clock = [0.0] * len(schedule.ranks)
    ends: dict[tuple[int, str, int], float] = {}
    starts: dict[PipeAction, float] = {}
    for rank, action in runnable_order(schedule):
        needed = schedule.awaited(action)
        if needed is not None:
            here = schedule.rank_of(needed[0], action.micro_batch) == rank
            sent = 0.0 if here else times.send[min(action.stage, needed[0])]
            clock[rank] = max(clock[rank], ends[(*needed, action.micro_batch)] + sent)
        starts[action] = clock[rank]
        clock[rank] += seconds_of(action, times)
        if action.kind != "W":
            ends[action.stage, "F" if action.kind == "F" else "gradient", action.micro_batch] = clock[rank]
    return starts


def seconds_of(action: PipeAction, times: StageTimes) -> float:
    """Of a pass; `times.backward` is of the input gradients."""
    whole = times.backward[action.stage] + times.weight[action.stage]
    return {
        "F": times.forward[action.stage],
        "B": whole,
        "I": times.backward[action.stage],
        "W": times.weight[action.stage],
    }[action.kind]


def search_schedule(
    first: Schedule,
    times: StageTimes,
    memory: PassMemory | None = None,
    limits: Sequence[float] | None = None,
    *,
    effort: float = 10.0,
) -> Searched:
    """The best schedule found with the stages where `first` has them; deterministic.

    limits: bytes that the micro-batches of each rank may keep; effort: the solver's deterministic seconds. Raises
    ConfigurationError for schedules whose stages stand on two ranks or whose backward is left to the next step.
    """
    if any(action.micro_batch < 0 for action in first):
        raise ConfigurationError("a schedule that leaves backwards to the next step cannot be searched for")
    return _Search(first, times, memory, limits).run(effort)


class _Search:
    def __init__(
        self, first: Schedule, times: StageTimes, memory: PassMemory | None, limits: Sequence[float] | None
    ) -> None:
        self.first, self.times = first, times
        self.holders = first.rank_of_stage
        self.split = _split(first)
        self.hints = starts_of(self.split, times)
        self.seconds = length_of(self.split, times)
        self.unit = self.seconds / UNITS
        self.model = cp_model.CpModel()
        self.start: dict[PipeAction, cp_model.IntVar] = {}
        self.lengths = {a: math.floor(seconds_of(a, times) / self.unit) for a in self.split}
        self._add_passes()
        self._add_order()
        if memory is not None and limits is not None:
            self._add_memory(memory, limits)

    def run(self, effort: float) -> Searched:
        end = self.model.new_int_var(0, 2 * UNITS, "end")
        for action, start in self.start.items():
            self.model.add(start + self.lengths[action] <= end)
        self.model.minimize(end)
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = effort
        solver.parameters.num_workers = 1
        status = solver.solve(self.model)
        bound = solver.best_objective_bound * self.unit
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Searched(schedule=self.first, seconds=length_of(self.first, self.times), bound_seconds=bound)
        order = {action: (solver.value(start), self.hints[action]) for action, start in self.start.items()}
        found = Schedule(tuple(tuple(sorted(actions, key=order.__getitem__)) for actions in self.split.ranks))
        best = min((self.first, found), key=lambda schedule: length_of(schedule, self.times))
        return Searched(schedule=best, seconds=length_of(best, self.times), bound_seconds=bound)

    def _add_passes(self) -> None:
        for actions in self.split.ranks:
            intervals = []
            for action in actions:
                start = self.start[action] = self.model.new_int_var(0, 2 * UNITS, str(action))
                self.model.add_hint(start, math.floor(self.hints[action] / self.unit))
                intervals.append(self.model.new_fixed_size_interval_var(start, self.lengths[action], f"{action} runs"))
            self.model.add_no_overlap(intervals)

    def _add_order(self) -> None:
        stages = self.split.num_stages
        for action, start in self.start.items():
            stage, kind, micro_batch = action
            needed = producer(action, stages)
            if needed is not None:
                before = PipeAction(needed[0], "F" if needed[1] == "F" else "I", micro_batch)
                here = self.holders[needed[0]] == self.holders[stage]
                sent = 0 if here else math.floor(self.times.send[min(stage, needed[0])] / self.unit)
                self.model.add(self.start[before] + self.lengths[before] + sent <= start)
            own: dict[Kind, Kind] = {"I": "F", "W": "I"}
            if kind in own:
                before = PipeAction(stage, own[kind], micro_batch)
                self.model.add(self.start[before] + self.lengths[before] <= start)
            if micro_batch:
                before = PipeAction(stage, kind, micro_batch - 1)
                self.model.add(self.start[before] + self.lengths[before] <= start)

    def _add_memory(self, memory: PassMemory, limits: Sequence[float]) -> None:
        for actions, limit in zip(self.split.ranks, limits, strict=True):
            if math.isinf(limit):
                continue
            intervals, demands = [], []
            for action in actions:
                if action.kind != "F":
                    continue
                late = memory.until_weight[action.stage]
                sizes: dict[Kind, float] = {"I": memory.saved[action.stage] - late, "W": late}
                for kind, size in sizes.items():
                    last = PipeAction(action.stage, kind, action.micro_batch)
                    length = self.model.new_int_var(0, 2 * UNITS, f"{action} to {kind}")
                    end = self.start[last] + self.lengths[last]
                    intervals.append(self.model.new_interval_var(self.start[action], length, end, f"{action} {kind}"))
                    demands.append(math.ceil(size / limit * BYTE_UNITS))
            self.model.add_cumulative(intervals, demands, BYTE_UNITS)


def _split(schedule: Schedule) -> Schedule:
    """Every B as I and W."""

    def parts(action: PipeAction) -> list[PipeAction]:
        return [action._replace(kind="I"), action._replace(kind="W")] if action.kind == "B" else [action]

    return Schedule(tuple(tuple(part for action in actions for part in parts(action)) for actions in schedule.ranks))
