"""Stages on rank groups of different sizes and shapes: the cut over the block tables of several sub-meshes, placed.

    3 devices, tables of 1 and 2         blocks 0 .. 3 on 1 device, 4 .. 11 on 2         ranks 2 | 0, 1
    parts of 1 and 2 devices             blocks 0 .. 3 on the first part, 4 .. 11 on 2   ranks 0 | 1, 2

The stage search chooses blocks, sub-mesh and recomputation of every stage at once, under the memory that 1F1B keeps in
flight; every schedule with one stage per rank is then played on that cut, and the fastest that fits is kept. So are the
best cuts with groups of one size and a mesh for each stage: the search's formula knows neither the end of a step nor
bubbles of unequal stages, so its optimum may play slower than one nearby. Larger
groups take the lower ranks, so that each lies inside of nodes or fills them. A value that goes to a group of another
size is priced as its sender's layout says. Where devices are of several kinds, each kind is a part
(`BlockTable.group`): the search uses all devices of every part, groups lie side by side inside theirs, and a border
between parts costs what the link between them takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopar.cost_models.schedule_player import play_pipeline, schedule_for
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.choose_pipeline import Pipeline
from autopar.planner.pipelines.solved_submeshes import SubMesh
from autopar.planner.pipelines.stage_search import Cut, CutQuestion, cut_into_stages
from autopar.planner.problem.limits import LIMITS
from autopar.request.pipeline_request import UNEQUAL_FAMILIES

Part: TypeAlias = tuple[int, int]
"""Devices of one kind, and how many of them a node has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unequal:
    """A pipeline whose stage s stands on `subs[s]`, from rank `first_ranks[s]` on. pipeline.table: of stage 0."""

    pipeline: Pipeline
    subs: tuple[SubMesh, ...]
    first_ranks: tuple[int, ...]


def best_unequal(
    subs: Sequence[SubMesh],
    parts: Sequence[Part],
    micro_batches: int,
    sizes: Sequence[int] = (),
    families: Sequence[str] = UNEQUAL_FAMILIES,
    num_stages: int | None = None,
) -> Unequal | None:
    """The fastest pipeline over the sub-meshes, all devices in use; None where nothing fits, or groups do not lie side
    by side in their part. sizes: devices of every stage, num_stages: how many, where they are given."""
    devices = [part[0] for part in parts]
    unit = min((sub.table.devices for sub in subs), default=1)
    if any(number % unit for number in (*devices, *(sub.table.devices for sub in subs))):
        unit = 1
    given = len(sizes) or num_stages
    most = given or min(LIMITS.unequal_stages, sum(devices) // unit, subs[0].table.num_blocks if subs else 0)
    least = given or 2
    if not subs or most < least:
        return None
    free = CutQuestion(
        tables=tuple(replace(sub.table.with_shares(micro_batches), devices=sub.table.devices // unit) for sub in subs),
        devices=tuple(number // unit for number in devices),
        micro_batches=micro_batches,
        in_flight=tuple(min(left + 1, micro_batches) for left in range(most)),
        least_stages=least,
        sizes=tuple(size // unit for size in sizes),
    )
    best: Unequal | None = None
    shortest = math.inf
    for question in (free, *_of_equal_groups(free)):
        found = cut_into_stages(question)
        if found is None or found.objective_seconds > LIMITS.near_unequal * shortest:
            continue
        shortest = min(shortest, found.objective_seconds)
        played = _played(found, subs, parts, micro_batches, families)
        if played is not None and (best is None or played.pipeline.step_seconds < best.pipeline.step_seconds):
            best = played
    return best


def _of_equal_groups(free: CutQuestion) -> Iterator[CutQuestion]:
    """The same with groups of one size, of which there are several meshes; nothing where sizes are given, or where
    devices are of several kinds."""
    sizes = [] if free.sizes or len(free.devices) > 1 else [table.devices for table in free.tables]
    for size in sorted(set(sizes)):
        stages, rest = divmod(free.devices[0], size)
        if not rest and sizes.count(size) > 1 and free.least_stages <= stages <= len(free.in_flight):
            yield replace(free, in_flight=free.in_flight[:stages], least_stages=stages, sizes=(size,) * stages)


def _played(
    found: Cut, subs: Sequence[SubMesh], parts: Sequence[Part], micro_batches: int, families: Sequence[str]
) -> Unequal | None:
    """A cut under the fastest schedule that fits; None where none does, or groups do not lie side by side."""
    chosen = tuple(subs[stage.table] for stage in found.stages)
    first_ranks = _first_ranks([sub.table for sub in chosen], parts)
    if first_ranks is None:
        return None
    stages = [
        sub.table.stage(stage.first, stage.end, stage.mode) for sub, stage in zip(chosen, found.stages, strict=True)
    ]
    sends = [
        float(sub.table.sends_to(behind.table.group)[stage.end - 1])
        for sub, behind, stage in zip(chosen[:-1], chosen[1:], found.stages[:-1], strict=True)
    ]
    best: Pipeline | None = None
    for family in families:
        schedule = schedule_for(family, stages, len(stages), micro_batches, max(sends, default=0.0))
        costs = play_pipeline(stages, schedule, send_seconds=sends)
        fits = all(peak <= sub.table.capacity_bytes for peak, sub in zip(costs.peak_bytes, chosen, strict=True))
        if fits and (best is None or costs.step_seconds < best.step_seconds):
            best = Pipeline(
                family=family,
                chunks=1,
                micro_batches=micro_batches,
                table=chosen[0].table,
                cut=found,
                costs=costs,
            )
    return None if best is None else Unequal(pipeline=best, subs=chosen, first_ranks=first_ranks)


def _first_ranks(tables: Sequence[BlockTable], parts: Sequence[Part]) -> tuple[int, ...] | None:
    """The first rank of the group of every table, the ranks of one part behind those of another; None where groups do
    not lie side by side."""
    first, begin = [0] * len(tables), 0
    for number, (devices, per_node) in enumerate(parts):
        own = [index for index, table in enumerate(tables) if table.group == number]
        placed = place_groups([tables[index].devices for index in own], per_node)
        if placed is None:
            return None
        for index, rank in zip(own, placed, strict=True):
            first[index] = begin + rank
        begin += devices
    return tuple(first)


def place_groups(sizes: Sequence[int], per_node: int) -> tuple[int, ...] | None:
    """The first rank of groups of these sizes, side by side from rank 0 on; None where a group would lie across a node
    that it does not fill.

    place_groups((1, 2, 4, 1), 4) is (6, 4, 0, 7).
    """
    first = [0] * len(sizes)
    end = 0
    for group in sorted(range(len(sizes)), key=lambda group: -sizes[group]):
        size = sizes[group]
        if size < per_node and end // per_node != (end + size - 1) // per_node:
            return None
        if size >= per_node and (size % per_node or end % per_node):
            return None
        first[group], end = end, end + size
    return tuple(first)
