"""The stage search: cut a sequence of blocks into stages on sub-meshes so that the step is shortest. Exact.

    minimise    sum_s (t_s + c_s)  +  (m - 1) max_s t_s
    over        contiguous stages s, a sub-mesh (a `BlockTable`) and a way of recomputation for each
    subject to  states + in flight x saved + transients <= capacity of every stage, all devices used

t: seconds of forward and backward of one micro-batch, c: transfers over the border behind the stage, both ways, m:
micro-batches. For a limit T of all t_s a dynamic programme finds the smallest sum (`_Pass`):

    best[s][i, d] = min over stages i .. j on a sub-mesh of u devices with t <= T of  t + c + best[s - 1][j, d - u]

with s stages, the blocks from i on and d devices left (a vector: one number per group of devices). As c depends on the
group of the stage behind too, best is kept for every group of the first of its stages. T runs over the
values of t themselves, no rounded ones: sums never grow with T, so between two limits all costs are bounded by the
smaller limit and the sum of the larger one, and intervals whose bound is no better than the best cut are dropped.

Exact: the minimum of the formula over all contiguous cuts, sub-meshes of the tables, ways of recomputation per stage.
Restricted: the sub-meshes are those of the tables; the formula is 1F1B's with equal stages, which the caller replaces
by the simulated step of what it finds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ConfigurationError
from autopar.planner.pipelines.block_table import BlockTable, Floats, run_sums, run_transients

Modes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutQuestion:
    """devices: of every group; all are used. in_flight: micro-batches that the last stage keeps, the one before it, ...
    for at most that many stages, and at least `least_stages`. sizes: devices of every stage, in order, where they are
    given; () leaves them open."""

    tables: tuple[BlockTable, ...]
    devices: tuple[int, ...]
    micro_batches: int
    in_flight: tuple[float, ...]
    least_stages: int = 1
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        blocks = {table.num_blocks for table in self.tables}
        if len(blocks) != 1 or any(not 0 <= table.group < len(self.devices) for table in self.tables):
            raise ConfigurationError(
                f"tables of {sorted(blocks)} blocks, groups {sorted({t.group for t in self.tables})} of "
                f"{len(self.devices)}: the same blocks in all tables, and groups that exist"
            )
        if self.micro_batches < 1 or not 1 <= self.least_stages <= len(self.in_flight) or min(self.devices) < 0:
            raise ConfigurationError(
                f"{self.micro_batches} micro-batches, {self.least_stages} to {len(self.in_flight)} stages, "
                f"{self.devices} devices: at least 1 each"
            )

        if self.sizes and not len(self.sizes) == self.least_stages == len(self.in_flight):
            raise ConfigurationError(f"stages on {list(self.sizes)} devices, but {self.least_stages} stages: one each")

    @property
    def num_blocks(self) -> int:
        """Blocks that stages are cut of."""
        return self.tables[0].num_blocks

    def allows(self, table: BlockTable, behind: int) -> bool:
        """Whether a stage with so many stages behind it may stand on the sub-mesh of a table."""
        return not self.sizes or table.devices == self.sizes[-1 - behind]


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Blocks first .. end - 1 on the sub-mesh of a table, recomputed in the way of a row."""

    first: int
    end: int
    table: int
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The best stages, in order. objective_seconds: of the formula; passes: dynamic programmes that were run, for so
    many candidates of the slowest stage."""

    stages: tuple[StageChoice, ...]
    objective_seconds: float
    slowest_seconds: float
    passes: int
    candidates: int


def cut_into_stages(question: CutQuestion) -> Cut | None:
    """The best cut; None where nothing fits into memory."""
    return _Search(question).run()


class _Runs:
    """Seconds of every run of blocks on one sub-mesh, with the fastest recomputation that fits."""

    def __init__(self, table: BlockTable, num_groups: int) -> None:
        self._seconds = np.stack([run_sums(row) for row in table.seconds])
        states = run_sums(table.state_bytes)
        passes = ((table.forward_extra_bytes, table.saved_bytes), (table.backward_extra_bytes, table.freed_bytes))
        transients = [
            np.maximum(*(run_transients(extra[mode], room[mode]) for extra, room in passes))
            for mode in range(len(table.modes))
        ]
        update = 0.0 if table.update_bytes is None else run_sums(table.update_bytes)
        self._fixed = np.stack([states + np.maximum(most, update) for most in transients])
        self._saved = np.stack([run_sums(row) + table.arrived(mode) for mode, row in enumerate(table.saved_bytes)])
        self._capacity = table.capacity_bytes
        size = table.num_blocks
        ends = np.add.outer(np.arange(size), np.arange(size))

        def sends(seconds: Floats) -> Floats:
            both_ways = np.append(2.0 * seconds, 0.0)
            return np.where(ends < size, both_ways[np.minimum(ends, size - 1)], np.inf)

        self.sends: list[Floats] = [sends(table.sends_to(group)) for group in range(num_groups)]
        """To a stage on each group of devices."""

    def fastest(self, in_flight: float) -> tuple[Floats, Modes]:
        """(seconds [length - 1, first], row of the mode); infinity where nothing fits."""
        with np.errstate(invalid="ignore"):
            fits = self._fixed + in_flight * self._saved <= self._capacity
        seconds = np.where(fits, self._seconds, np.inf)
        return seconds.min(axis=0), np.asarray(seconds.argmin(axis=0), dtype=np.int64)


@dataclass(slots=True)
class _Found:
    """What one pass found: the smallest sum, and the cut that has it."""

    sum_seconds: float
    slowest_seconds: float
    stages: tuple[StageChoice, ...]


class _Search:
    """Intervals of limits, the most promising first."""

    def __init__(self, question: CutQuestion) -> None:
        self.question = question
        self.runs = [_Runs(table, len(question.devices)) for table in question.tables]
        self.fastest = {h: [runs.fastest(h) for runs in self.runs] for h in sorted(set(question.in_flight))}
        every = np.concatenate([seconds.ravel() for tables in self.fastest.values() for seconds, _ in tables])
        self.limits = np.unique(every[np.isfinite(every)])
        self.passes = 0

    def run(self) -> Cut | None:
        more = self.question.micro_batches - 1
        best = self.solve(len(self.limits) - 1) if len(self.limits) else None
        if best is None:
            return None
        cost = best.sum_seconds + more * best.slowest_seconds
        intervals = [(0.0, -1, int(np.searchsorted(self.limits, best.slowest_seconds)), best.sum_seconds)]
        while intervals:
            _, low, high, least_sum = heapq.heappop(intervals)  # low fails or is solved, high is solved
            high = min(high, self.first_hopeless(cost, more, least_sum))
            if high - low < 2:
                continue
            middle = (low + high) // 2
            found = self.solve(middle)
            if found is None:
                self.push(intervals, middle, high, least_sum, more)
                continue
            if found.sum_seconds + more * found.slowest_seconds < cost:
                best, cost = found, found.sum_seconds + more * found.slowest_seconds
            at = int(np.searchsorted(self.limits, found.slowest_seconds))  # limits down to here have this answer
            self.push(intervals, low, at, found.sum_seconds, more)
            if found.sum_seconds > least_sum:
                self.push(intervals, middle, high, least_sum, more)
        return Cut(
            stages=best.stages,
            objective_seconds=cost,
            slowest_seconds=best.slowest_seconds,
            passes=self.passes,
            candidates=len(self.limits),
        )

    def push(
        self, intervals: list[tuple[float, int, int, float]], low: int, high: int, least_sum: float, more: int
    ) -> None:
        if high - low >= 2:
            heapq.heappush(intervals, (more * float(self.limits[low + 1]) + least_sum, low, high, least_sum))

    def first_hopeless(self, cost: float, more: int, least_sum: float) -> int:
        """The first limit with which no cut of at least this sum is better."""
        return int(np.searchsorted(more * self.limits + least_sum, cost)) if more else 0

    def solve(self, position: int) -> _Found | None:
        self.passes += 1
        return _Pass(self.question, self.runs, self.fastest, float(self.limits[position])).run()


class _Pass:
    """The dynamic programme of one limit."""

    def __init__(
        self,
        question: CutQuestion,
        runs: list[_Runs],
        fastest: dict[float, list[tuple[Floats, Modes]]],
        limit: float,
    ) -> None:
        self.question, self.fastest = question, fastest
        self.within = {
            h: [
                [np.where(t <= limit, t + sends, np.inf) for sends in r.sends]
                for (t, _), r in zip(tables, runs, strict=True)
            ]
            for h, tables in fastest.items()
        }
        self.groups = range(len(question.devices))
        sizes = (size + 1 for size in question.devices)
        start = np.full((len(self.groups), question.num_blocks + 1, *sizes), np.inf)
        for group in self.groups:
            start[(group, question.num_blocks, *(0 for _ in self.groups))] = 0.0
        self.best = [start]
        """By number of stages: [group of the first of them, first block, devices left of every group]."""

    def run(self) -> _Found | None:
        question = self.question
        for in_flight in question.in_flight:
            self.best.append(self._one_more(self.best[-1], in_flight))
        sums = [
            min(self._entry(count, group, 0, question.devices) for group in self.groups)
            for count in range(question.least_stages, len(self.best))
        ]
        least = min(sums)
        if not np.isfinite(least):
            return None
        stages = self._stages(question.least_stages + sums.index(least))
        slowest = max(self._seconds(number, stage) for number, stage in enumerate(reversed(stages)))
        return _Found(least, slowest, stages)

    def _one_more(self, behind: Floats, in_flight: float) -> Floats:
        """Sums with one stage more in front."""
        found = np.full_like(behind, np.inf)
        reachable = np.flatnonzero(np.isfinite(behind).any(axis=(0, *range(2, behind.ndim))))
        if not len(reachable):
            return found
        lowest, highest, number = int(reachable[0]), int(reachable[-1]), len(self.best) - 1
        for table, costs in zip(self.question.tables, self.within[in_flight], strict=True):
            if not self.question.allows(table, number):
                continue
            for length in (np.flatnonzero(np.isfinite(costs[0]).any(axis=1)) + 1).tolist():
                first, last = max(0, lowest - length), highest - length
                if last < first:
                    break
                target, source = self._slices(table, slice(first, last + 1), slice(first + length, last + length + 1))
                best = found[table.group][target]
                for group in self.groups:
                    column = costs[group][length - 1, first : last + 1].reshape(-1, *([1] * len(self.groups)))
                    np.minimum(best, column + behind[group][source], out=best)
        return found

    def _slices(self, table: BlockTable, here: slice, behind: slice) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where a stage on the table's devices leads to, and what it stands in front of."""
        used = [table.devices if group == table.group else 0 for group in self.groups]
        target = (here, *(slice(u, None) for u in used))
        source = (behind, *(slice(0, size + 1 - u) for u, size in zip(used, self.question.devices, strict=True)))
        return target, source

    def _stages(self, count: int) -> tuple[StageChoice, ...]:
        """The stages whose costs add up to the sum of the programme: each step is one of its additions."""
        question = self.question
        first, left, stages = 0, list(question.devices), list[StageChoice]()
        group = min(self.groups, key=lambda group: self._entry(count, group, first, left))
        for number in range(count, 0, -1):
            in_flight = question.in_flight[number - 1]
            table, end, group = self._step(number, first, left, group)
            mode = self.fastest[in_flight][table][1][end - first - 1, first]
            stages.append(StageChoice(first, end, table, int(mode)))
            first = end
            left[question.tables[table].group] -= question.tables[table].devices
        return tuple(stages)

    def _step(self, number: int, first: int, left: list[int], group: int) -> tuple[int, int, int]:
        """(table, end, group of the stage behind) of the stage that made one entry."""
        question = self.question
        wanted = self._entry(number, group, first, left)
        for index, (table, costs) in enumerate(
            zip(question.tables, self.within[question.in_flight[number - 1]], strict=True)
        ):
            rest = list(left)
            rest[table.group] -= table.devices
            if table.group != group or rest[group] < 0 or not question.allows(table, number - 1):
                continue
            for next_group in self.groups:
                entries: tuple[int | slice, ...] = (next_group, slice(first + 1, None), *rest)
                behind = self.best[number - 1][entries]
                hits = np.flatnonzero(costs[next_group][: len(behind), first] + behind == wanted)
                if len(hits):
                    return index, first + 1 + int(hits[0]), next_group
        raise AssertionError("an entry of the programme has no step that made it")

    def _entry(self, number: int, group: int, first: int, left: Sequence[int]) -> float:
        return float(self.best[number][(group, first, *left)])

    def _seconds(self, number: int, stage: StageChoice) -> float:
        seconds, _ = self.fastest[self.question.in_flight[number]][stage.table]
        return float(seconds[stage.end - stage.first - 1, stage.first])
