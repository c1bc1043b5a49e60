"""Stages whose blocks are made again in spans, where blocks made again one by one do not fit.

    64 layers, pp=4, 1f1b     stages of 16 layers, of which 4, 3, 2 and 1 micro-batches are in flight
    spans                     of 6, 5, 5 | 6, 5, 5 | 5, 4, 4, 3 | 4, 4, 4, 4 (the last one is kept): `stage_spans.py`
    table                     of these 13 spans as blocks: the search and the player take it as any other

The stages of the fastest pipelines without a memory limit say where spans may begin, and their schedules how many
micro-batches each keeps. Spans of blocks are then what stages are cut of, so the same search, with the same memory,
says which stages make them again. Restricted: few pipelines; stages of these spans end where a span ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.nested_spans import NestedSpans
from autopar.planner.memory.recomputation import repeatable
from autopar.planner.memory.spans import SpanBytes
from autopar.planner.memory.stage_spans import fastest_in_stage, smallest_in_stage
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.within_memory import local_bytes, seconds_of_segments
from autopar.planner.pipelines.block_costs import Solved
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.choose_pipeline import Pipeline, Tried, try_tables, without_limit
from autopar.planner.pipelines.in_flight import kept_by_stage
from autopar.planner.pipelines.runs import THROUGH, Runs, find_runs
from autopar.planner.pipelines.submesh import asked_modes, tables_of
from autopar.planner.problem.limits import LIMITS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spanned:
    """A sub-mesh with spans as its blocks, and what was tried on it, the best first."""

    solved: Solved
    runs: Runs
    tables: Sequence[BlockTable]
    tried: Sequence[Tried]

    @property
    def pipeline(self) -> Pipeline | None:
        """The best one that fits."""
        return self.tried[0].pipeline


def with_spans(
    query: Query,
    part: Query,
    solved: Solved,
    runs: Runs,
    table: BlockTable,
    num_groups: int,
    count: int,
    families: Sequence[str],
) -> Spanned | None:
    """The best pipeline of spans, or the one that holds least where none fits; None where there is nothing to span.

    query: of the whole question; part: of one micro-batch of it; table: of the blocks of `solved`.
    """
    if query.recompute == "none":
        return None
    asked = _Asked(query, part, solved, runs, table)
    free = without_limit(table, num_groups, count, families)
    found, known = list[Spanned](), set[object]()
    for pipeline in free[: LIMITS.spanned_pipelines]:
        best: Spanned | None = None
        for nested in asked.spans_of(pipeline):
            key = tuple((each.starts, each.anew) for each in nested)
            if key in known or not any(each.anew or len(each.starts) < each.segments for each in nested):
                continue
            known.add(key)
            found.append(each := asked.tried(nested, num_groups, count, pipeline.family))
            if best is not None and _order(each) >= _order(best):
                break
            best = each if each.pipeline is not None else best
    return min(found, key=_order, default=None)


def _order(one: Spanned) -> tuple[float, float]:
    if one.pipeline is not None:
        return one.pipeline.step_seconds, 0.0
    seen = [each.least_peak_bytes for each in one.tried if each.least_peak_bytes is not None]
    return float("inf"), min(seen, default=float("inf"))


@dataclass(frozen=True, slots=True)
class _StageSpans:
    """Spans of one stage, in segments of the program; segments: how many it has."""

    starts: tuple[int, ...]
    anew: tuple[tuple[int, int], ...]
    segments: int


class _Asked:
    """The spans of pipelines of one sub-mesh."""

    def __init__(self, query: Query, part: Query, solved: Solved, runs: Runs, table: BlockTable) -> None:
        self.query, self.part, self.solved, self.runs, self.table = query, part, solved, runs, table
        value_bytes = partial(local_bytes, solved.built, solved.mesh, solved.labels)
        self.spans = SpanBytes.of(solved.lifetimes, value_bytes, repeatable(solved.built, query.recompute, {}))
        self.seconds = seconds_of_segments(solved.built, solved.lifetimes, solved.labels)

    def spans_of(self, pipeline: Pipeline) -> Iterator[list[_StageSpans]]:
        """Spans of all stages in more and less room; where "full" was asked for, the smallest."""
        if self.query.recompute != "full":
            for share in LIMITS.stage_rooms:
                yield [self._of_stage(pipeline, stage, share) for stage in range(len(pipeline.cut.stages))]
        yield [self._of_stage(pipeline, stage, 0.0) for stage in range(len(pipeline.cut.stages))]

    def tried(self, nested: Sequence[_StageSpans], num_groups: int, count: int, family: str) -> Spanned:
        """The pipeline of a family on the table of these spans."""
        alone = self.solved.lifetimes
        starts = tuple(start for stage in nested for start in stage.starts)
        anew = tuple(run for stage in nested for run in stage.anew)
        joined = alone.joined(starts, NestedSpans(starts, anew, 0.0).given_up(alone))
        solved, runs = replace(self.solved, lifetimes=joined), self._runs(joined)
        modes = [mode for mode in asked_modes(self.query) if mode != "selective" or self.query.recompute is not None]
        tables = tables_of(self.query, self.part, solved, runs, num_groups, modes)
        tried = try_tables(tables, num_groups, count, (family,))
        return Spanned(solved=solved, runs=runs, tables=tables, tried=tried)

    def _of_stage(self, pipeline: Pipeline, stage: int, share: float) -> _StageSpans:
        """share: of the room of the stage; 0: as small as one level of spans is."""
        choice, in_flight = pipeline.cut.stages[stage], kept_by_stage(pipeline.costs.schedule)[stage]
        first, end = self._segments(choice.first, choice.end)
        spans, is_last = self.spans.part(first, end), end == len(self.seconds)
        room = share * self._room(pipeline, stage)
        found = fastest_in_stage(spans, self.seconds[first:end], room, in_flight, keeps_last=is_last)
        starts = smallest_in_stage(spans, in_flight, keeps_last=is_last) if found is None else found.starts
        return _StageSpans(
            starts=tuple(first + start for start in starts),
            anew=() if found is None else tuple((first + i, first + j) for i, j in found.anew),
            segments=end - first,
        )

    def _room(self, pipeline: Pipeline, stage: int) -> float:
        """Bytes of a device that a stage may fill with what is saved and made again: its share of what states leave."""
        schedule, stages, table = pipeline.costs.schedule, pipeline.cut.stages, self.table
        rank = schedule.holders[stage][0]
        beside = [number for number, holders in enumerate(schedule.holders) if rank in holders]
        states = sum(float(table.state_bytes[stages[n].first : stages[n].end].sum()) for n in beside)
        passing = max(self._passing(run) for run in range(stages[stage].first, stages[stage].end))
        arrived = kept_by_stage(schedule)[stage] * float(table.arrived(-1)[stages[stage].first])
        return (self.query.budget_bytes - states) / len(beside) - passing - arrived

    def _passing(self, run: int) -> float:
        """What comes and goes in backward of a block beside what it makes again."""
        made = float(self.spans.made[self._segments(run, run + 1)])
        return max(0.0, float(self.table.backward_extra_bytes[-1, run]) - made)

    def _segments(self, first: int, end: int) -> tuple[int, int]:
        """The segments of some runs."""
        of_segment = self.runs.of_segment
        return bisect_left(of_segment, first), bisect_left(of_segment, end)

    def _runs(self, joined: Lifetimes) -> Runs:
        """The runs of spans, named by the runs that they hold."""
        found, alone = find_runs(joined), self.runs
        firsts = [joined.starts[found.of_segment.index(run)] for run in range(len(found.names))]
        ends = [*firsts[1:], len(alone.of_segment)]
        names = [
            (alone.names[alone.of_segment[first]], alone.names[alone.of_segment[end - 1]])
            for first, end in zip(firsts, ends, strict=True)
        ]
        return replace(found, names=tuple(a if a == b else f"{a}{THROUGH}{b}" for a, b in names))
