"""Scaling on paper: simulated steps of our plan and of the usual ones on 64 to 16,384 GPUs.

    python -m benchmarks.plan_quality.scaling [--case llama3-8b@64] [--resume]

    autopar    what the free search finds
    ddp, zero3 the baselines that the search prices beside its own, on the same prices
    megatron   the best 3-D grid dp x tp x pp with equal stages (`benchmarks.published_plans`): without stages in 2 or
               4 micro-batches, else under 1F1B or interleaved over the numbers of micro-batches of the case
    expert     what NVIDIA's engineers run of that size on H100, with more copies where there are more devices

Nodes of eight H100 behind the network of the hardware description. The table goes to docs/plan-quality.md by hand, the
plot to docs/plan-quality-scaling.svg. A row takes minutes of planning and is written when it is done.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import autopar
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.planner.batch.batch_flow import NotSeparable
from autopar.planner.pipelines.solved_submeshes import SubMeshes
from benchmarks.models import WORKLOADS, workload
from benchmarks.plan_quality.experts import EXPERTS, Expert, expert_seconds
from benchmarks.plan_quality.plans import describe
from benchmarks.plan_quality.scaling_plot import plot
from benchmarks.published_plans import PER_NODE, grid_meshes, grid_seconds
from benchmarks.published_settings import Setting
from benchmarks.results import write_results
from benchmarks.sub_meshes import sub_meshes

RESULTS = Path(__file__).parents[1] / "results" / "plan_quality_scaling.json"
PLOT = Path(__file__).parents[2] / "docs" / "plan-quality-scaling.svg"
WHOLE = (2, 4)
"""Counts of micro-batches that the grid tries without stages."""
KNOWN = {"ddp": "DDP", "zero3": "ZeRO-3"}
"""Our keys and the names of the baselines of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload of `benchmarks.models`, the global batch in samples, and the counts of micro-batches that Megatron's
    grid tries. layers: what the grid cuts into equal stages; the 126 of Llama 3.1 405B count as 128, since its authors
    left two out for the embedding and the head."""

    workload: str
    layers: int
    gpus: int
    batch: int
    micro_batches: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.workload}@{self.gpus}"

    @property
    def expert(self) -> Expert:
        return EXPERTS[self.workload]

    @property
    def cluster(self) -> Cluster:
        return Cluster.parse(f"{self.gpus // PER_NODE}x{PER_NODE} H100-SXM")


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(workload="gpt2-1.3b", layers=24, gpus=64, batch=256, micro_batches=(8, 16)),
        Case(workload="gpt2-1.3b", layers=24, gpus=256, batch=1024, micro_batches=(8, 16)),
        Case(workload="llama3-8b", layers=32, gpus=64, batch=128, micro_batches=(16, 32)),
        Case(workload="llama3-8b", layers=32, gpus=256, batch=512, micro_batches=(16, 32)),
        Case(workload="llama3-8b", layers=32, gpus=1024, batch=1024, micro_batches=(16, 32)),
        Case(workload="llama3-70b", layers=80, gpus=512, batch=512, micro_batches=(16, 32)),
        Case(workload="llama3-70b", layers=80, gpus=2048, batch=1024, micro_batches=(16, 32)),
        Case(workload="llama3.1-405b", layers=128, gpus=4096, batch=2048, micro_batches=(16, 32)),
        Case(workload="llama3.1-405b", layers=128, gpus=16384, batch=2048, micro_batches=(8, 16)),
    )
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--case", "names", multiple=True, type=click.Choice(list(CASES)), help="Default: all cases.")
@click.option("--resume", is_flag=True, help="Keep the rows that the output has.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
@click.option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), default=PLOT, show_default=True)
def main(names: Sequence[str], resume: bool, output: Path, picture: Path) -> None:
    """Simulated steps of our plan beside DDP, ZeRO-3 and Megatron's best grid."""
    console = Console(stderr=True)
    rows: dict[str, dict[str, Any]] = {}
    if output.exists() and (resume or names):
        rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    for name in names or CASES:
        if resume and name in rows:
            continue
        rows[name] = run(CASES[name])
        ordered = [rows[known] for known in CASES if known in rows]
        write_results(output, {"rows": ordered})
        picture.write_text(plot(ordered))
        console.print_json(json.dumps(rows[name]))


def run(case: Case) -> dict[str, Any]:
    """One row: simulated seconds of a step, None where a plan does not fit."""
    began = time.process_time()
    model, inputs = workload(case.workload, batch=case.batch)
    row: dict[str, Any] = {"name": case.name, "gpus": case.gpus, "batch": case.batch}
    found = autopar.plan(model, inputs, cluster=case.cluster, optimizer=torch.optim.AdamW)
    row |= {"autopar_seconds": found.predicted.step_seconds, "autopar_plan": describe(found)}
    known = {baseline.name: baseline.predicted for baseline in found.baselines}
    for key, name in KNOWN.items():
        said = known.get(name)
        row[f"{key}_seconds"] = None if said is None else said.step_seconds
    row["planning_cpu_seconds"] = round(time.process_time() - began, 1)
    shapes = sub_meshes(model, inputs, case.cluster)
    others = {"megatron": megatron(case, shapes), "expert": expert_seconds(case.expert, grid_setting(case), shapes)}
    for key, (seconds, words) in others.items():
        row |= {f"{key}_seconds": seconds if math.isfinite(seconds) else None, f"{key}_plan": words}
    return row | {"cpu_seconds": round(time.process_time() - began, 1)}


def megatron(case: Case, shapes: SubMeshes) -> tuple[float, str]:
    """The best grid of the case: simulated seconds, and the grid in words."""
    setting = grid_setting(case)
    best = (math.inf, "none fits")
    for count in (*WHOLE, *case.micro_batches):
        subs = []
        for mesh in grid_meshes(setting):
            if (mesh.size < case.gpus and count in WHOLE) or case.batch % (count * mesh.shape[0]):
                continue  # stages ask for more micro-batches; or one has fewer samples than copies
            try:
                sub = shapes.on_mesh(count, mesh)
            except (AutoparError, NotSeparable):  # heads or widths that this tp does not divide, one part
                continue
            if sub is not None:
                subs.append(sub)
        best = min(best, grid_seconds(setting, subs, count))
    return best


def grid_setting(case: Case) -> Setting:
    """The case in the words of `benchmarks.published_plans`."""
    entry = WORKLOADS[case.workload]
    return Setting(
        name=case.name,
        gpus=case.gpus,
        micro_batches=case.micro_batches[0],
        stages=((case.layers, case.gpus),),
        build=entry.build,
        inputs=lambda batch: entry.inputs(batch, entry.seq),
        batch=case.batch,
        dtype=torch.bfloat16,
    )


if __name__ == "__main__":
    main()
