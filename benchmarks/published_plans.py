"""Found plans beside published ones: python -m benchmarks.published_plans [MODEL ...] [--write]

Alpa's settings (`published_settings.py`) on nodes of eight V100 of 16 GB behind 25 Gb/s: GPT and MoE in fp16, Wide-
ResNet in fp32, AdamW, the loss alone returned. For each the simulated step of

    alpa       the plan that Alpa's repository ships: its stages, sub-meshes and number of micro-batches, under 1F1B
    megatron   the best 3-D grid dp x tp x pp with equal stages, the same way of recomputation in all of them, under
               1F1B or interleaved; as many micro-batches as Alpa's plan, or half
    found      what the stage search finds over the same sub-meshes, from one stage on, with as many micro-batches as
               Alpa's plan, or half

All are priced by the same block tables. Inside of Alpa's sub-meshes stand the best layouts that our solver finds (any
layouts, and dp x tp with whole replicas), gathered once per step or for every micro-batch, and each of Alpa's stages
recomputes in the fastest way that fits: so the published plans are not made worse than they are.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopar.cost_models.schedule_player import StepCosts, play_pipeline, schedule_for
from autopar.cost_models.stage_costs import StageCosts
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.choose_pipeline import try_tables
from autopar.planner.pipelines.compared_pipelines import QUICK
from autopar.planner.pipelines.solved_submeshes import SubMesh, SubMeshes
from autopar.planner.pipelines.unequal_groups import best_unequal
from benchmarks.published_settings import SETTINGS, Setting
from benchmarks.results import write_results
from benchmarks.sub_meshes import sub_meshes

RESULTS = Path(__file__).parent / "results" / "published_plans.json"
PER_NODE = 8
MEMORY = "14GiB"
"""Of 16 GB, less the context and what the allocator wastes."""

MEMORY_SHARES = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)


def captured(setting: Setting) -> SubMeshes:
    """The model on its cluster."""
    nodes = max(1, setting.gpus // PER_NODE)
    cluster = Cluster.parse(f"{nodes}x{min(setting.gpus, PER_NODE)} V100 @ 25Gb")
    with torch.device("meta"):
        model, inputs = setting.build(), setting.inputs(setting.batch)
    return sub_meshes(model.to(setting.dtype).train(), inputs, cluster, MEMORY)


def published_seconds(setting: Setting, subs: Sequence[SubMesh]) -> float:
    """The simulated step of Alpa's plan, on the best mesh of every stage; infinity where it does not fit.

    Stages are chosen by a count of their bytes; where the played peak is above the limit, with less memory."""
    for share in MEMORY_SHARES:
        played = _played(setting, subs, share)
        if played is None:
            break
        if max(played.peak_bytes) <= subs[0].table.capacity_bytes:
            return played.step_seconds
    return math.inf


def _played(setting: Setting, subs: Sequence[SubMesh], share: float) -> StepCosts | None:
    """Alpa's plan with stages that count at most this share of a device's memory; None where some stage has more."""
    stages, sends, first = [], [], 0
    in_front = blocks_in_front(setting, subs[0].table)
    for number, (layers, devices) in enumerate(setting.stages):
        left = len(setting.stages) - number
        end = first + layers + (in_front if number == 0 else 0) + (left == 1)
        found = [
            (
                setting.micro_batches * costs.compute_seconds + costs.once_seconds,
                costs,
                table.send_seconds[end - 1] if left > 1 else 0.0,
            )
            for sub in subs
            if sub.table.devices == devices
            for table in sub.tables
            for costs in _fitting(table, first, end, min(left, setting.micro_batches), share)
        ]
        if not found:
            return None
        _, costs, send = min(found, key=lambda one: one[0])
        stages.append(costs)
        sends.append(float(send))
        first = end
    schedule = schedule_for("1f1b", stages, len(stages), setting.micro_batches)
    return play_pipeline(stages, schedule, send_seconds=sends[:-1])


def blocks_in_front(setting: Setting, table: BlockTable) -> int:
    """Embedding or stem: what is no layer, but for one head behind them; 0 where embedding and head take the place of a
    layer each, as in Llama 3.1 405B, so that all stages have equally many blocks."""
    return max(0, table.num_blocks - setting.layers - 1)


def _fitting(table: BlockTable, first: int, end: int, in_flight: int, share: float) -> Iterable[StageCosts]:
    for mode in range(len(table.modes)):
        costs = table.stage(first, end, mode)
        held = costs.state_bytes + in_flight * costs.saved_bytes
        if held + max(costs.forward_extra_bytes, costs.backward_extra_bytes) <= share * table.capacity_bytes:
            yield costs


def grid_meshes(setting: Setting) -> list[Mesh]:
    """dp x tp of one stage of every 3-D grid."""
    sizes = [
        n for n in range(1, setting.gpus + 1) if setting.gpus % n == 0 and setting.layers % (setting.gpus // n) == 0
    ]
    return [
        Mesh(("dp_replicate", "tp"), (size // tp, tp))
        for size in sizes
        for tp in (1, 2, 4, 8)
        if size % tp == 0 and tp <= setting.widest_tp and (size <= PER_NODE or size % PER_NODE == 0)
    ]


def grid_seconds(setting: Setting, subs: Sequence[SubMesh], count: int) -> tuple[float, str]:
    """The best grid: stages of equally many layers."""
    best = (math.inf, "none fits")
    for sub in subs:
        groups = setting.gpus // sub.table.devices
        chunks = (1, 2) if groups > 1 and setting.layers % (2 * groups) == 0 and count % groups == 0 else (1,)
        for each in chunks:
            seconds = min(equal_stages(setting, table, groups, each, count) for table in sub.tables)
            dp, tp = sub.solved.mesh.shape
            best = min(best, (seconds, f"dp={dp} tp={tp} pp={groups} x {each}, {count} micro-batches"))
    return best


def equal_stages(setting: Setting, table: BlockTable, groups: int, chunks: int, count: int) -> float:
    """The simulated step of `groups` ranks with `chunks` stages each, all of equally many layers, under 1F1B or
    interleaved; infinity where it does not fit."""
    layers, family = setting.layers // (groups * chunks), "1f1b" if chunks == 1 else "interleaved"
    in_front = blocks_in_front(setting, table)
    ends = [in_front + layers * (stage + 1) for stage in range(groups * chunks)]
    ends[-1] = table.num_blocks
    for mode in range(len(table.modes)):
        stages = [table.stage(first, end, mode) for first, end in zip([0, *ends[:-1]], ends, strict=True)]
        sends = [float(table.send_seconds[end - 1]) for end in ends[:-1]]
        schedule = schedule_for(family, stages, groups, count)
        played = play_pipeline(stages, schedule, send_seconds=sends)
        if max(played.peak_bytes) <= table.capacity_bytes:
            return played.step_seconds
    return math.inf


def found_seconds(setting: Setting, subs: Sequence[SubMesh], count: int) -> tuple[float, str]:
    """The best pipeline over everything that was solved, of equal groups or not."""
    best = (math.inf, "none fits")
    for sub in subs:
        groups = setting.gpus // sub.table.devices
        families = ("1f1b",) if groups == 1 else [f for f in QUICK if 2 * groups <= sub.table.num_blocks] or ["1f1b"]
        if groups > sub.table.num_blocks:
            continue
        pipeline = try_tables(sub.tables, groups, count, families)[0].pipeline
        if pipeline is not None:
            shape = "x".join(map(str, sub.solved.mesh.shape))
            best = min(
                best, (pipeline.step_seconds, f"pp={groups} x {shape}, {pipeline.family}, {count} micro-batches")
            )
    single = [replace(sub, tables=(table,)) for sub in subs for table in sub.tables]
    mixed = best_unequal(single, [(setting.gpus, PER_NODE)], count) if setting.gpus > 1 else None
    if mixed is not None:
        sizes = "+".join(str(sub.table.devices) for sub in mixed.subs)
        best = min(
            best, (mixed.pipeline.step_seconds, f"groups {sizes}, {mixed.pipeline.family}, {count} micro-batches")
        )
    return best


def run(setting: Setting) -> dict[str, Any]:
    """One row: three simulated steps in seconds."""
    began = time.process_time()
    shapes = captured(setting)
    steps: dict[str, tuple[float, str]] = {"found": (math.inf, ""), "megatron": (math.inf, ""), "alpa": (math.inf, "")}
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= setting.gpus]
    for count in dict.fromkeys((setting.micro_batches, setting.micro_batches // 2)):
        free = [sub for size in sizes for sub in shapes.of(count, size)]
        grid = [sub for mesh in grid_meshes(setting) if (sub := shapes.on_mesh(count, mesh)) is not None]
        if count == setting.micro_batches:
            steps["alpa"] = published_seconds(setting, [*free, *grid]), f"{setting.stages}, {count} micro-batches"
        steps["megatron"] = min(steps["megatron"], grid_seconds(setting, grid, count))
        steps["found"] = min(steps["found"], found_seconds(setting, [*free, *grid], count))
    row: dict[str, Any] = {"model": setting.name, "gpus": setting.gpus}
    for name, (seconds, plan) in steps.items():
        row |= {f"{name}_seconds": round(seconds, 4) if math.isfinite(seconds) else None, f"{name}_plan": plan}
    row["cpu_seconds"] = round(time.process_time() - began, 1)
    return row


def main() -> None:
    asked = [word for word in sys.argv[1:] if word != "--write"]
    for setting in SETTINGS:
        if not asked or setting.name in asked:
            try:
                row = run(setting)
            except (AutoparError, NotSeparable) as error:
                row = {"model": setting.name, "gpus": setting.gpus, "error": str(error)}
            print(row, flush=True)
            if "--write" in sys.argv:
                write_results(RESULTS, {"rows": _with_row(row)})


def _with_row(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows on disk with this one: rows take minutes, and each may be run alone."""
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    known = {each["model"]: each for each in (*rows, row)}
    return [known[setting.name] for setting in SETTINGS if setting.name in known]


if __name__ == "__main__":
    main()
