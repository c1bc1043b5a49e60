"""`autopar demo`: both halves, with what they show."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.demo.large_plan import CLUSTER, LARGE_BATCH, plan_large_gpt
from autopar.demo.training import STEPS, Training, train
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_mesh, format_seconds
from autopar.report.terminal_tables import comparison, table
from autopar.runtime.calibration.measure_machine import calibrate

PROCESSES = 4


def run_demo(console: Console) -> dict[str, Any]:
    """Run the demo, print it, and return its numbers as a JSON document."""
    started = time.perf_counter()
    large = plan_large_gpt()
    planning_seconds = time.perf_counter() - started
    console.print(comparison(large, f"GPT 1.3 B, {LARGE_BATCH} sequences of 2048, bf16, AdamW on {CLUSTER}"))
    console.print(f"planned in {planning_seconds:.1f} s, no GPU was needed\n")
    console.print("measuring this machine (once, about two minutes) ...")
    calibrate()
    one, four = _train_both(console)
    assert four.plan is not None
    show_training(console, one, four, four.plan)
    return {
        "large": {**plan_numbers(large), "planning_seconds": planning_seconds},
        "small": {**plan_numbers(four.plan), **training_numbers(one, four)},
        "seconds": time.perf_counter() - started,
    }


def _train_both(console: Console) -> tuple[Training, Training]:
    """One plain process, then four under their plan, each with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        plain = progress.add_task("1 process, plain torch", total=STEPS)
        one = train(1, planned=False, on_step=lambda step: progress.update(plain, completed=step))
        planned = progress.add_task(f"{PROCESSES} processes, planned", total=STEPS)
        four = train(PROCESSES, planned=True, on_step=lambda step: progress.update(planned, completed=step))
    return one, four


def show_training(console: Console, one: Training, four: Training, plan: Plan) -> None:
    """Losses, their largest difference, and the predicted beside the measured step."""
    console.print(comparison(plan, f"byte-level GPT on {plan.cluster}"))
    mesh = format_mesh(dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)))
    predicted = format_seconds(plan.predicted.step_seconds)
    rows = [
        (f"{PROCESSES} processes ({mesh})", f"{four.losses[-1]:.6f}", format_seconds(four.step_seconds), predicted),
        ("1 process, plain torch", f"{one.losses[-1]:.6f}", format_seconds(one.step_seconds), "-"),
    ]
    console.print(table(f"after {len(one.losses)} steps", ("run", "loss", "measured step", "predicted step"), rows))
    console.print(f"first loss {one.losses[0]:.6f}; largest difference of a loss: {largest_difference(one, four):.2e}")


def largest_difference(one: Training, four: Training) -> float:
    """Over all steps."""
    return max(abs(a - b) for a, b in zip(one.losses, four.losses, strict=True))


def plan_numbers(plan: Plan) -> dict[str, Any]:
    """What is compared: the mesh, and the costs of the plan and of its baselines, in seconds and bytes."""
    return {
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "predicted_step_seconds": plan.predicted.step_seconds,
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "objective_seconds": plan.objective_seconds,
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "baselines": {
            baseline.name: None if baseline.predicted is None else baseline.predicted.step_seconds
            for baseline in plan.baselines
        },
    }


def training_numbers(one: Training, four: Training) -> dict[str, Any]:
    """Losses and measured seconds of both runs."""
    return {
        "loss_one_process": one.losses[-1],
        "loss_planned": four.losses[-1],
        "largest_difference": largest_difference(one, four),
        "measured_step_seconds": four.step_seconds,
        "measured_step_seconds_one_process": one.step_seconds,
    }
