"""Found plans beside published ones: python -m benchmarks.published_plans [GPUS ...] [--write]

The GPT models of Alpa (OSDI 2022) on nodes of eight V100 of 16 GB behind 25 Gb/s, global batch 1024 of 1024 tokens. For
each the simulated step of

    alpa       the plan that Alpa's repository ships: its stages, sub-meshes and number of micro-batches, under 1F1B
    megatron   the best 3-D grid dp x tp x pp with equal stages, the same micro-batches, under 1F1B or interleaved
    found      what the stage search finds over the same sub-meshes, twice and half as many micro-batches too

All are priced by the same block tables: layouts inside of Alpa's sub-meshes are the best that our solver finds there,
and each stage of every plan recomputes in the fastest way that fits, so the published plans are not made worse than
they are. GShard MoE and Wide-ResNet are left out: their plans are not published in a readable form.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.cluster import Cluster
from autopar.cost_models.pipeline import play_pipeline, schedule_for
from autopar.errors import AutoparError
from autopar.layout import Mesh
from autopar.planner.stages.block_table import BlockTable
from autopar.planner.stages.choose import try_tables
from autopar.planner.stages.quick import QUICK
from autopar.planner.stages.shapes import SubMesh, SubMeshes
from autopar.planner.stages.unequal import best_unequal
from benchmarks.models import LossOnly, gpt2, token_inputs
from benchmarks.results import write_results
from benchmarks.sub_meshes import sub_meshes

RESULTS = Path(__file__).parent / "results" / "published_plans.json"
BATCH, SEQUENCE, VOCABULARY, PER_NODE = 1024, 1024, 51200, 8
MEMORY = "14GiB"
"""Of 16 GB, less the context and what the allocator wastes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One model on one cluster, and the plan of alpa-projects/alpa benchmark/alpa/suite_auto_gpt.py: the layers and
    devices of every stage."""

    name: str
    gpus: int
    width: int
    layers: int
    heads: int
    micro_batches: int
    stages: tuple[tuple[int, int], ...]


SETTINGS = (
    Setting(name="GPT-350M", gpus=1, width=1024, layers=24, heads=16, micro_batches=512, stages=((24, 1),)),
    Setting(name="GPT-760M", gpus=2, width=1536, layers=24, heads=16, micro_batches=128, stages=((12, 1),) * 2),
    Setting(name="GPT-1.3B", gpus=4, width=2048, layers=24, heads=32, micro_batches=128, stages=((12, 2),) * 2),
    Setting(
        name="GPT-2.6B", gpus=8, width=2560, layers=32, heads=32, micro_batches=128, stages=((8, 2), (8, 2), (16, 4))
    ),
    Setting(name="GPT-6.7B", gpus=16, width=4096, layers=32, heads=32, micro_batches=64, stages=((16, 8),) * 2),
    Setting(name="GPT-15B", gpus=32, width=5120, layers=48, heads=32, micro_batches=128, stages=((12, 8),) * 4),
    Setting(name="GPT-39B", gpus=64, width=8192, layers=48, heads=64, micro_batches=1024, stages=((3, 4),) * 16),
)


def captured(setting: Setting) -> SubMeshes:
    """The model in fp16 on its cluster."""
    nodes = max(1, setting.gpus // PER_NODE)
    cluster = Cluster.parse(f"{nodes}x{min(setting.gpus, PER_NODE)} V100 @ 25Gb")
    with torch.device("meta"):
        model = gpt2(
            layers=setting.layers,
            width=setting.width,
            heads=setting.heads,
            vocabulary=VOCABULARY,
            positions=SEQUENCE,
        )
        inputs = token_inputs(VOCABULARY)(BATCH, SEQUENCE)
    return sub_meshes(LossOnly(model).to(torch.float16).train(), inputs, cluster, MEMORY)


def published_seconds(setting: Setting, subs: Sequence[SubMesh]) -> float:
    """The simulated step of Alpa's plan, on the best mesh of every stage; infinity where it does not fit."""
    stages, sends, first = [], [], 0
    for number, (layers, devices) in enumerate(setting.stages):
        left = len(setting.stages) - number
        end = first + layers + (number == 0) + (left == 1)
        found = [
            (costs.compute_seconds, costs, sub.table.send_seconds[end - 1] if left > 1 else 0.0)
            for sub in subs
            if sub.table.devices == devices
            for costs in _fitting(sub.table, first, end, min(left, setting.micro_batches))
        ]
        if not found:
            return math.inf
        _, costs, send = min(found, key=lambda one: one[0])
        stages.append(costs)
        sends.append(float(send))
        first = end
    schedule = schedule_for("1f1b", stages, len(stages), setting.micro_batches)
    return play_pipeline(stages, schedule, send_seconds=sends[:-1]).step_seconds


def _fitting(table: BlockTable, first: int, end: int, in_flight: int) -> Iterable[Any]:
    for mode in range(len(table.modes)):
        costs = table.stage(first, end, mode)
        held = costs.state_bytes + in_flight * costs.saved_bytes
        if held + max(costs.forward_extra_bytes, costs.backward_extra_bytes) <= table.capacity_bytes:
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
        if size % tp == 0 and setting.heads % tp == 0 and (size <= PER_NODE or size % PER_NODE == 0)
    ]


def grid_seconds(setting: Setting, subs: Sequence[SubMesh], count: int) -> tuple[float, str]:
    """The best grid: stages of equally many layers."""
    best = (math.inf, "none fits")
    for sub in subs:
        groups = setting.gpus // sub.table.devices
        chunks = (1, 2) if groups > 1 and setting.layers % (2 * groups) == 0 and count % groups == 0 else (1,)
        for each in chunks:
            seconds = _equal_stages(setting, sub.table, groups, each, count)
            dp, tp = sub.solved.mesh.shape
            best = min(best, (seconds, f"dp={dp} tp={tp} pp={groups} x {each}, {count} micro-batches"))
    return best


def _equal_stages(setting: Setting, table: BlockTable, groups: int, chunks: int, count: int) -> float:
    layers, family = setting.layers // (groups * chunks), "1f1b" if chunks == 1 else "interleaved"
    ends = [1 + layers * (stage + 1) for stage in range(groups * chunks)]
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
    mixed = best_unequal(subs, setting.gpus, PER_NODE, count) if setting.gpus > 1 else None
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
            steps["alpa"] = published_seconds(setting, free), f"{setting.stages}, {count} micro-batches"
        steps["megatron"] = min(steps["megatron"], grid_seconds(setting, grid, count))
        steps["found"] = min(steps["found"], found_seconds(setting, [*free, *grid], count))
    row: dict[str, Any] = {"model": setting.name, "gpus": setting.gpus}
    for name, (seconds, plan) in steps.items():
        row |= {f"{name}_seconds": round(seconds, 4) if math.isfinite(seconds) else None, f"{name}_plan": plan}
    row["cpu_seconds"] = round(time.process_time() - began, 1)
    return row


def main() -> None:
    asked = [int(word) for word in sys.argv[1:] if word.isdigit()]
    rows = []
    for setting in SETTINGS:
        if not asked or setting.gpus in asked:
            try:
                rows.append(run(setting))
            except AutoparError as error:
                rows.append({"model": setting.name, "gpus": setting.gpus, "error": str(error)})
            print(rows[-1], flush=True)
            if "--write" in sys.argv:
                write_results(RESULTS, {"rows": rows})


if __name__ == "__main__":
    main()
