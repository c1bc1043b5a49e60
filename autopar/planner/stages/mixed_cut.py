"""Stages on devices of several kinds: the cut over the block tables of all parts at once, placed part by part.

    "1 cpu + 2 cpu"      blocks 0 .. 3 on the first part, 4 .. 11 on 2 devices of the second      ranks 0 | 1, 2

As `unequal.py`, but for `BlockTable.group`, which is the part: the search uses all devices of every part, a border
between parts costs what the link between them takes, and groups lie side by side inside their part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster import Cluster, MixedCluster
from autopar.cost_models.pipeline import play_pipeline, schedule_for
from autopar.planner.stages.block_table import BlockTable
from autopar.planner.stages.choose import Pipeline
from autopar.planner.stages.cut import CutQuestion, cut_into_stages
from autopar.planner.stages.shapes import SubMesh
from autopar.planner.stages.unequal import FAMILIES, MOST_STAGES, Unequal, place_groups


def best_mixed(
    subs: Sequence[SubMesh],
    cluster: MixedCluster,
    micro_batches: int,
    sizes: Sequence[int] = (),
    families: Sequence[str] = FAMILIES,
    num_stages: int | None = None,
) -> Unequal | None:
    """The fastest pipeline over the sub-meshes, all devices in use; None where nothing fits, or groups do not lie side
    by side in their part. sizes: devices of every stage, num_stages: how many, where they are given."""
    parts = cluster.parts
    devices = [part.num_devices for part in parts]
    unit = min((sub.table.devices for sub in subs), default=1)
    if not subs or any(sub.table.devices % unit for sub in subs) or any(size % unit for size in devices):
        unit = 1
    pinned = len(sizes) or num_stages
    most = pinned or min(MOST_STAGES, sum(devices) // unit, subs[0].table.num_blocks if subs else 0)
    least = pinned or 2
    if not subs or most < least:
        return None
    found = cut_into_stages(
        CutQuestion(
            tables=tuple(replace(sub.table, devices=sub.table.devices // unit) for sub in subs),
            devices=tuple(size // unit for size in devices),
            micro_batches=micro_batches,
            in_flight=tuple(min(left + 1, micro_batches) for left in range(most)),
            least_stages=least,
            sizes=tuple(size // unit for size in sizes),
        )
    )
    if found is None:
        return None
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


def _first_ranks(tables: Sequence[BlockTable], parts: Sequence[Cluster]) -> tuple[int, ...] | None:
    """The first rank of the group of every table, the ranks of one part behind those of another."""
    first, begin = [0] * len(tables), 0
    for number, part in enumerate(parts):
        own = [index for index, table in enumerate(tables) if table.group == number]
        placed = place_groups([tables[index].devices for index in own], part.devices_per_node)
        if placed is None:
            return None
        for index, rank in zip(own, placed, strict=True):
            first[index] = begin + rank
        begin += part.num_devices
    return tuple(first)
