"""Collectives beside computation in the stages of a pipeline, measured and predicted: python -m benchmarks.overlap

    python -m benchmarks.overlap [--only NAME]... [--steps N] [--write]

A GPT trains on four emulated nodes behind links of 1 Gbit/s, two stages of two ranks each. Every setting is planned
once, from a profile that `autopar profile` measures on the emulated network, and its steps run in turn under that plan
and under the same one with its collectives one by one (`bucket_bytes` null). A row has the median of the slowest rank's
seconds of both, the same as the planner predicts them, and as the lowered programs are played.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import autopar
from autopar.capture import Captures
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.planner.batch.micro_batch_program import in_parts
from autopar.plans.parallel_plan import Plan
from autopar.questions import capture_model
from autopar.request import Request
from autopar.simulation.played_plan import simulate_plan
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.machine import why_unavailable
from benchmarks.netlab.pipelines.job import RESULTS, WARM_UP_STEPS
from benchmarks.netlab.pipelines.settings import SETTINGS
from benchmarks.netlab.presets import PRESETS
from benchmarks.netlab.processes import ended_by_signals
from benchmarks.plan_quality.measure import profiled
from benchmarks.results import commit, write_results

OUTPUT = Path(__file__).parent / "results" / "overlap.json"
OVERLAPPED, ONE_BY_ONE = "overlapped", "one by one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """setting: of `netlab.pipelines.settings`; the rest: what is asked of the planner."""

    setting: str
    axis: str
    schedule: str
    micro_batches: int


ROWS: Mapping[str, Row] = {
    "data-1f1b": Row(setting="gpt-overlap", axis="dp_replicate", schedule="1f1b", micro_batches=2),
    "data-zb": Row(setting="gpt-overlap", axis="dp_replicate", schedule="zb-h1", micro_batches=2),
    "shards-1f1b": Row(setting="gpt-overlap", axis="dp_shard", schedule="1f1b", micro_batches=2),
    "tensor-1f1b": Row(setting="gpt-overlap", axis="tp", schedule="1f1b", micro_batches=2),
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice(list(ROWS)), default=tuple(ROWS))
@click.option("--steps", default=8, show_default=True, help="Timed steps of either plan.")
@click.option("--plan-only", is_flag=True, help="Predict, and run nothing.")
@click.option("--write", is_flag=True, help=f"Keep the rows in {OUTPUT.name}.")
def main(only: Sequence[str], steps: int, plan_only: bool, write: bool) -> None:
    """Pipelines with collectives beside computation and one by one, on an emulated network of 1 Gbit/s."""
    if not plan_only and (reason := why_unavailable()) is not None:
        raise click.ClickException(reason)
    console, rows = Console(stderr=True), []
    try:
        with ended_by_signals():
            for name in only:
                rows.append(compared(name, 0 if plan_only else steps, console))
                console.print_json(json.dumps(rows[-1]))
    except AutoparError as error:
        raise click.ClickException(str(error)) from error
    if write:
        write_results(OUTPUT, {"command": "python -m benchmarks.overlap", "commit": commit(), "rows": rows})


def compared(name: str, steps: int, console: Console) -> dict[str, Any]:
    """One row. steps: 0 measures nothing."""
    row = ROWS[name]
    network = PRESETS[SETTINGS[row.setting].preset]
    cluster = profiled(network, console)
    plans = plans_of(row, cluster)
    predicted = {
        OVERLAPPED: plans[OVERLAPPED].predicted.step_seconds,
        ONE_BY_ONE: plans[OVERLAPPED].objective_seconds,
    }
    played = {kind: played_seconds(row, plan, cluster) for kind, plan in plans.items()}
    found: dict[str, Any] = {
        "name": name, "network": network.name, "axis": row.axis, "schedule": row.schedule,
        "micro_batches": row.micro_batches, "bucket_bytes": dict(plans[OVERLAPPED].bucket_bytes or {}),
        "predicted": with_factor(predicted), "played": with_factor(played),
    }  # fmt: skip
    if steps:
        seconds, losses = measured(row.setting, plans, steps)
        medians = {kind: statistics.median(each) for kind, each in seconds.items()}
        found |= {
            "measured": with_factor(medians), "steps": seconds,
            "predicted_over_measured": {kind: predicted[kind] / medians[kind] for kind in medians},
            "played_over_measured": {kind: played[kind] / medians[kind] for kind in medians},
            "largest_difference_of_losses": max(
                abs(one / other - 1.0) for one, other in zip(losses[OVERLAPPED], losses[ONE_BY_ONE], strict=True)
            ),
        }  # fmt: skip
    return found


def plans_of(row: Row, cluster: Cluster) -> dict[str, Plan]:
    """The plan as it is found, and with its collectives one by one."""
    model, inputs = SETTINGS[row.setting].model_and_inputs()
    plan = autopar.plan(
        model, inputs, cluster=cluster, optimizer=torch.optim.SGD, mode="fast", with_baselines=False,
        dims={"pp": 2, row.axis: 2}, schedule=row.schedule, micro_batches=row.micro_batches, recompute="none",
    )  # fmt: skip
    return {OVERLAPPED: plan, ONE_BY_ONE: plan.with_(bucket_bytes=None, product_chunks={})}


def played_seconds(row: Row, plan: Plan, cluster: Cluster) -> float:
    """The step of the lowered programs."""
    model, inputs = SETTINGS[row.setting].model_and_inputs()
    request = Request(cluster=Cluster.parse("1 cpu"), optimizer=torch.optim.SGD)
    captured = capture_model(model, (), dict(inputs), request, Captures(), training=True)
    program = in_parts(captured.program, plan.micro_batches, captured)
    return simulate_plan(plan, program, cluster, torch.optim.SGD).step_seconds


def with_factor(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of both, and how many times as fast the overlapped one is."""
    return {**seconds, "factor": seconds[ONE_BY_ONE] / seconds[OVERLAPPED]}


def measured(setting: str, plans: Mapping[str, Plan], steps: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """(seconds, losses) of the timed steps under each plan, in turn."""
    with tempfile.TemporaryDirectory(prefix="autopar-overlap-") as folder:
        for kind, plan in plans.items():
            plan.save(Path(folder) / f"{kind}.plan")
        with Lab(PRESETS[SETTINGS[setting].preset]) as lab:
            lab.run([sys.executable, "-m", "benchmarks.netlab.pipelines.job", setting, folder, str(steps)], quiet=True)
        rows = json.loads((Path(folder) / RESULTS).read_text())
    timed = {kind: each[WARM_UP_STEPS:] for kind, each in rows.items()}
    seconds = {kind: [step["seconds"] for step in each] for kind, each in timed.items()}
    return seconds, {kind: [step["loss"] for step in each] for kind, each in rows.items()}


if __name__ == "__main__":
    main()
