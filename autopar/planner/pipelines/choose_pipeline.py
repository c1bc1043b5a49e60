"""Choose the pipeline of one block table: family of schedules, chunks per rank, cut and recomputation, by playing them.

    4 ranks, 8 micro-batches      1f1b 33.0 ms, zb-h1 30.2 ms, zb-h2 28.1 ms but 9.1 GiB of 8       ->  zb-h1

For every family the stage search finds the cut, with what the family keeps in flight; the pipeline is then played over
its real schedule, and the shortest simulated step that fits into memory wins. Where the played peak is above the limit
(halves of backward keep more than the search counts), the search runs again with a smaller one.

Restricted: families with several chunks per rank are cut as if a rank's memory were shared out equally among its
chunks, and as if it were no limit; both cuts then recompute as what their ranks really hold allows
(`choose_recomputation.py`), and the shorter step wins. The two stages of a rank in pipelines of both directions share
it equally; these also pay for adding up the gradients of every stage over its two rank groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.schedule_player import StepCosts, play_pipeline, schedule_for
from autopar.errors import ConfigurationError
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.choose_recomputation import fastest_recomputation
from autopar.planner.pipelines.in_flight import in_flight, kept_by_stage
from autopar.planner.pipelines.stage_search import Cut, CutQuestion, cut_into_stages
from autopar.planner.problem.limits import LIMITS
from autopar.request.pipeline_request import SEARCHED
from autopar.schedules.list_scheduler import FAMILIES, OPT_IN_FAMILIES, build_schedule
from autopar.schedules.orders import check_both_ways

COMPARED = tuple(name for name in FAMILIES if name not in OPT_IN_FAMILIES)
"""Families that are tried where none is asked for, each with the chunks of its policy."""
STALE_COPIES = 3
"""Of the parameters, that a rank of 2bw keeps beside: the weights of this step and of the one before, and the gradients
of the step that has not been handed out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """A schedule with its stages, played. cut: the stages' blocks and recomputation, in the order of the model."""

    family: str
    chunks: int
    micro_batches: int
    table: BlockTable
    cut: Cut
    costs: StepCosts

    @property
    def step_seconds(self) -> float:
        """Of the simulated step."""
        return self.costs.step_seconds

    @property
    def recomputes(self) -> bool:
        """Whether a stage computes anything twice."""
        return any(self.table.modes[stage.mode] != "none" for stage in self.cut.stages)

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank group."""
        return max(self.costs.peak_bytes)

    @property
    def host_bytes(self) -> float:
        """What a device of the rank group that uses it most lets wait on the host."""
        schedule, kept = self.costs.schedule, kept_by_stage(self.costs.schedule, until_weights=True)
        waiting = [self.table.waiting_bytes(stage.first, stage.end, stage.mode) for stage in self.cut.stages]
        return max(
            sum(kept[stage] * waiting[stage] for stage, holders in enumerate(schedule.holders) if rank in holders)
            for rank in range(len(schedule.ranks))
        )

    @property
    def fits(self) -> bool:
        """Whether no device holds more than it has, nor its share of the host's memory."""
        table = self.table
        return self.peak_bytes <= table.capacity_bytes and self.host_bytes <= table.host_capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tried:
    """One family: what it became, or the least memory that was seen (None: the search found no cut that fits)."""

    family: str
    chunks: int
    pipeline: Pipeline | None
    least_peak_bytes: float | None = None


def families_for(family: str | None) -> tuple[str, ...]:
    """What is tried where a family, or none, is asked for. A free search starts from one whose stages have one rank."""
    if family == SEARCHED:
        return tuple(name for name in COMPARED if not FAMILIES[name].both_ways)
    return COMPARED if family is None else (family,)


def try_tables(
    tables: Sequence[BlockTable], num_ranks: int, micro_batches: int, families: Sequence[str] = COMPARED
) -> list[Tried]:
    """As `try_families`, of the first table on which a pipeline fits and nothing is recomputed, else of all."""
    found: list[Tried] = []
    for table in tables:
        found += try_families(table, num_ranks, micro_batches, families)
        found.sort(key=_step_seconds)
        best = found[0].pipeline
        if best is not None and not best.recomputes:
            break
    return found


def _step_seconds(one: Tried) -> float:
    return one.pipeline.step_seconds if one.pipeline else float("inf")


def try_families(
    table: BlockTable, num_ranks: int, micro_batches: int, families: Sequence[str] = COMPARED
) -> list[Tried]:
    """Every family with every number of chunks that the blocks fill: more of them are a smaller bubble for more
    messages, and stages of fewer blocks, of which some numbers divide evenly. Those that fit first, the fastest in
    front.

    Raises ConfigurationError where the blocks do not fill the ranks.
    """
    possible = _possible(table, num_ranks, families)
    if not possible:
        if all(FAMILIES[family].both_ways for family in families):
            check_both_ways(num_ranks)
        least = min(FAMILIES[family].chunks[0] for family in families)
        raise ConfigurationError(
            f"{table.num_blocks} pieces of the model do not fill {least * num_ranks} stages; a model is cut between "
            "its blocks (modules whose path ends in a number): use a smaller pp, or another schedule"
        )
    tried = [_fitted_anywhere(table, num_ranks, micro_batches, family, chunks) for family, chunks in possible]
    return sorted(tried, key=_step_seconds)


def without_limit(
    table: BlockTable, num_ranks: int, micro_batches: int, families: Sequence[str] = COMPARED
) -> list[Pipeline]:
    """The pipelines that `try_families` looks at, as they are without a memory limit, the fastest in front."""
    found = [
        _one_pipeline(table, num_ranks, micro_batches, family, chunks, math.inf)
        for family, chunks in _possible(table, num_ranks, families)
    ]
    return sorted((each for each in found if each is not None), key=lambda each: each.step_seconds)


def _possible(table: BlockTable, num_ranks: int, families: Sequence[str]) -> list[tuple[str, int]]:
    """Families with numbers of chunks that the blocks fill."""
    return [
        (family, chunks)
        for family in families
        for chunks in FAMILIES[family].chunks
        if chunks * num_ranks <= table.num_blocks and not (FAMILIES[family].both_ways and num_ranks % 2)
    ]


def _fitted_anywhere(table: BlockTable, num_ranks: int, micro_batches: int, family: str, chunks: int) -> Tried:
    """As `_fitted`, and without the memory of the host where that is too small."""
    found, here = _fitted(table, num_ranks, micro_batches, family, chunks), table.on_device()
    return _fitted(here, num_ranks, micro_batches, family, chunks) if found.pipeline is None and here else found


def _fitted(table: BlockTable, num_ranks: int, micro_batches: int, family: str, chunks: int) -> Tried:
    """One family: the cut of the formula, with less memory until it fits when played; where it recomputes or does not
    fit, also with recomputation chosen by what ranks hold (stages on one rank each)."""
    limit, least, fitting = table.capacity_bytes, list[float](), list[Pipeline]()
    for _ in range(LIMITS.settling_rounds):
        found = _one_pipeline(table, num_ranks, micro_batches, family, chunks, limit)
        if found is None:
            break
        if found.fits:
            fitting.append(found)
            break
        least.append(found.peak_bytes)
        limit *= LIMITS.settling_safety * table.capacity_bytes / found.peak_bytes
    if not FAMILIES[family].both_ways and (not fitting or fitting[0].recomputes):
        free = _one_pipeline(table, num_ranks, micro_batches, family, chunks, math.inf)
        better = [_settled(each) for each in (*fitting, free) if each is not None]
        fitting += [each for each in better if each is not None]
    best = min(fitting, key=lambda each: each.step_seconds, default=None)
    return Tried(family=family, chunks=chunks, pipeline=best, least_peak_bytes=min(least, default=None))


def _settled(pipeline: Pipeline) -> Pipeline | None:
    """The same cut, recomputed as the memory of the ranks allows; None where it does not fit."""
    modes = fastest_recomputation(pipeline.table, pipeline.cut.stages, pipeline.costs.schedule)
    if modes is None:
        return None
    stages = tuple(replace(stage, mode=mode) for stage, mode in zip(pipeline.cut.stages, modes, strict=True))
    if stages == pipeline.cut.stages:
        return pipeline if pipeline.fits else None
    cut, num_ranks = replace(pipeline.cut, stages=stages), len(pipeline.costs.schedule.ranks)
    found = _played(pipeline.table, cut, pipeline.family, num_ranks, pipeline.micro_batches)
    return found if found.fits else None


def _one_pipeline(
    table: BlockTable, num_ranks: int, micro_batches: int, family: str, chunks: int, limit_bytes: float
) -> Pipeline | None:
    """The cut of the formula for one family, played; None where no cut fits the limit."""
    num_stages, both_ways = num_ranks * chunks, FAMILIES[family].both_ways
    shares = 2 * chunks if both_ways else chunks
    if family in OPT_IN_FAMILIES:
        table = table.with_copies(STALE_COPIES)
    route = build_schedule(family, num_ranks, 1, chunks).route(0)
    kept = in_flight(family, num_ranks, micro_batches, chunks)
    searched = table if FAMILIES[family].split_backward else table.with_whole_backward()
    question = CutQuestion(
        tables=(_share(searched, limit_bytes, shares),),
        devices=(num_stages,),
        micro_batches=micro_batches,
        in_flight=tuple(kept[rank] / shares for rank in reversed(route)),
        least_stages=num_stages,
    )
    cut = cut_into_stages(question)
    return None if cut is None else _played(table, cut, family, num_ranks, micro_batches)


def _share(table: BlockTable, limit_bytes: float, shares: int) -> BlockTable:
    """The table for one of so many stages of a rank: an equal share of the memory, and of transients, which are there
    once at a time."""
    return replace(
        table,
        devices=1,
        capacity_bytes=limit_bytes / shares,
        forward_extra_bytes=table.forward_extra_bytes / shares,
        backward_extra_bytes=table.backward_extra_bytes / shares,
    )


def _played(table: BlockTable, cut: Cut, family: str, num_ranks: int, micro_batches: int) -> Pipeline:
    """A cut under the schedule of a family."""
    chunks, both_ways = len(cut.stages) // num_ranks, FAMILIES[family].both_ways
    stages = [table.stage(stage.first, stage.end, stage.mode, twins=both_ways) for stage in cut.stages]
    route = build_schedule(family, num_ranks, 1, chunks).route(0)
    borders = table.borders([stage.end for stage in cut.stages[:-1]], route)
    schedule = schedule_for(family, stages, num_ranks, micro_batches, max(borders.seconds, default=0.0))
    return Pipeline(
        family=family,
        chunks=chunks,
        micro_batches=micro_batches,
        table=table,
        cut=cut,
        costs=play_pipeline(stages, schedule, send_seconds=borders.seconds, near=borders.near),
    )
