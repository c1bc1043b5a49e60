"""`python -m benchmarks.netlab.pipelines [--only NAME]... [--steps N] [--output FILE]`: pipelines on a slow network.

Per setting: the network is profiled once (as `autopar profile` does), plans are made from that profile and kept
beside it, and all plans train in turn on the emulated cluster. Printed and written, each measured and predicted: the
factor by which the pipeline beats the best plan without stages, and the bytes per link.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from autopar.capture import Captures
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.planner.batch.micro_batch_program import in_parts
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.questions import capture_model
from autopar.request import Request
from benchmarks.netlab.lab import Lab, network_cache
from benchmarks.netlab.machine import why_unavailable
from benchmarks.netlab.pipelines.job import RESULTS, WARM_UP_STEPS
from benchmarks.netlab.pipelines.plans import PIPELINE, WITHOUT, make_plans
from benchmarks.netlab.pipelines.settings import SETTINGS, Setting
from benchmarks.netlab.pipelines.traffic import sent_bytes
from benchmarks.netlab.presets import PRESETS
from benchmarks.netlab.processes import ended_by_signals
from benchmarks.results import write_results

DEFAULT = ("gpt-200mbit",)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice(list(SETTINGS)), default=DEFAULT, show_default=True)
@click.option("--steps", default=5, show_default=True, help="Timed steps of every plan.")
@click.option("--plan-only", is_flag=True, help="Make and keep the plans, run nothing.")
@click.option("--again", is_flag=True, help="Measure the network and plan again.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where the results are written.")
def main(only: Sequence[str], steps: int, plan_only: bool, again: bool, output: Path | None) -> None:
    """Pipelines against the best plan without stages, on emulated slow networks."""
    if (reason := why_unavailable()) is not None:
        raise click.ClickException(reason)
    console = Console(stderr=True)
    found = []
    try:
        with ended_by_signals():
            for name in only:
                folder = planned(name, again, console)
                if not plan_only:
                    found.append(measured(name, folder, steps))
                    console.print_json(json.dumps(found[-1]["summary"]))
    except AutoparError as error:
        raise click.ClickException(str(error)) from error
    if output is not None:
        write_results(output, {"settings": found})


def planned(name: str, again: bool, console: Console) -> Path:
    """The folder with the plans of a setting and what they are predicted to send; made where it is not there."""
    setting = SETTINGS[name]
    network = PRESETS[setting.preset]
    folder = network_cache(network) / "pipelines" / name
    if again and folder.exists():
        shutil.rmtree(folder)
    if (folder / "predicted.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    clusters = network_cache(network) / "clusters"
    if again or not clusters.exists():
        with Lab(network) as lab:
            lab.run([sys.executable, "-m", "autopar", "profile", "--force"], quiet=True)
    cluster = Cluster.from_file(next(clusters.glob("*.json")))
    plans = make_plans(setting, cluster, console.print)
    predicted = {}
    for kind, plan in plans.items():
        plan.save(folder / f"{kind}.plan")
        predicted[kind] = {
            "step_seconds": plan.predicted.step_seconds,
            "sent_bytes": sent_bytes(part_of(setting, plan), plan, cluster),
            "plan": describe(plan),
        }
    (folder / "predicted.json").write_text(json.dumps(predicted))
    return folder


def part_of(setting: Setting, plan: Plan) -> Program:
    """The program of one micro-batch."""
    model, inputs = setting.model_and_inputs()
    request = Request(cluster=Cluster.parse("1 cpu"), optimizer=torch.optim.SGD)
    captured = capture_model(model, (), dict(inputs), request, Captures(), training=True)
    whole = captured.program
    return whole if plan.pipeline is None else in_parts(whole, plan.micro_batches, captured).program


def describe(plan: Plan) -> str:
    """Mesh and schedule in a few words."""
    mesh = " x ".join(f"{name}={size}" for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    if plan.pipeline is None:
        return mesh
    return f"{mesh}, {plan.pipeline.schedule}, {plan.micro_batches} micro-batches"


def measured(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Train under all plans on a lab, and compare."""
    network = PRESETS[SETTINGS[name].preset]
    with Lab(network) as lab:
        lab.run([sys.executable, "-m", "benchmarks.netlab.pipelines.job", name, str(folder), str(steps)], quiet=True)
    rows: dict[str, list[dict[str, Any]]] = json.loads((folder / RESULTS).read_text())
    predicted = json.loads((folder / "predicted.json").read_text())
    plans = {kind: compared(rows[kind][WARM_UP_STEPS:], predicted[kind]) for kind in rows}
    losses = {kind: [row["loss"] for row in rows[kind]] for kind in rows}
    return {
        "setting": name,
        "network": network.name,
        "plans": plans,
        "losses": losses,
        "steps": {kind: [row["seconds"] for row in rows[kind][WARM_UP_STEPS:]] for kind in rows},
        "summary": summary(plans, losses),
    }


def compared(rows: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any]) -> dict[str, Any]:
    """Medians over the timed steps of one plan beside what was predicted."""
    nodes = range(len(rows[0]["sent_bytes"]))
    return {
        "plan": predicted["plan"],
        "step_seconds": statistics.median(row["seconds"] for row in rows),
        "predicted_step_seconds": predicted["step_seconds"],
        "sent_bytes": [statistics.median(row["sent_bytes"][node] for row in rows) for node in nodes],
        "predicted_sent_bytes": predicted["sent_bytes"],
    }


def summary(plans: Mapping[str, Mapping[str, Any]], losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The factor of the pipeline over the best plan without, and the largest differences of bytes and losses."""
    factor = {key: plans[WITHOUT][key] / plans[PIPELINE][key] for key in ("step_seconds", "predicted_step_seconds")}
    reference = losses[WITHOUT]
    return {
        "factor": factor["step_seconds"],
        "predicted_factor": factor["predicted_step_seconds"],
        "factor_error": factor["predicted_step_seconds"] / factor["step_seconds"] - 1.0,
        "bytes_error": {
            kind: max(
                (abs(a / b - 1.0) for a, b in zip(plan["sent_bytes"], plan["predicted_sent_bytes"], strict=True) if b),
                default=0.0,
            )
            for kind, plan in plans.items()
        },
        "steps": {kind: (plan["step_seconds"], plan["predicted_step_seconds"]) for kind, plan in plans.items()},
        "largest_difference_of_losses": max(
            abs(a / b - 1.0) for each in losses.values() for a, b in zip(each, reference, strict=True)
        ),
    }


if __name__ == "__main__":
    main()
