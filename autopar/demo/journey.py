"""`autopar demo`: both halves, with what they show and what to type next."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.cost_models.machine_profile import MOST_BUSY, load_profile
from autopar.demo.large_plan import CLUSTER, TITLE, plan_large_gpt
from autopar.demo.training import STEPS, Training, train
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_summary import beside_known_plans, format_share
from autopar.plans.plan_text import format_mesh, format_seconds
from autopar.report.progress_bars import with_progress
from autopar.report.progress_line import progress_line
from autopar.report.terminal_tables import comparison, table
from autopar.runtime.calibration.measure_machine import BRIEF, calibrate
from autopar.runtime.calibration.measuring_worker import usable_cores

MOST_PROCESSES = 4
NEXT = f'autopar plan autopar.demo.large_plan:build --cluster "{CLUSTER}" -o plan.json'


def run_demo(console: Console) -> dict[str, Any]:
    """Run the demo, print it, and return its numbers as a JSON document."""
    started = time.perf_counter()
    console.print(f"1 of 3   a plan for 16 GPUs that are not here ({CLUSTER})")
    with progress_line():
        large = plan_large_gpt()
    planning_seconds = time.perf_counter() - started
    console.print(comparison(large, TITLE))
    console.print(f"{beside_known_plans(large)}\nplanned in {planning_seconds:.0f} s\n")
    processes = max(2, min(MOST_PROCESSES, usable_cores()))
    _measure_machine(console)
    console.print(f"\n3 of 3   a small GPT trained by plain torch, and by {processes} processes under their plan")
    one, planned = train_both(console, processes)
    assert planned.plan is not None
    show_training(console, one, planned, planned.plan, processes)
    return {
        "large": {**plan_numbers(large), "planning_seconds": planning_seconds},
        "small": {**plan_numbers(planned.plan), **training_numbers(one, planned, processes)},
        "seconds": time.perf_counter() - started,
    }


def _measure_machine(console: Console) -> None:
    """Say what is measured, or since when it is known."""
    stored = load_profile()
    if stored is not None and stored.lasts:
        console.print(f"2 of 3   what processes on this machine can do was measured on {stored.date[:10]}")
        return
    console.print("2 of 3   what processes on this machine can do: a minute, once; `autopar profile` takes more care")
    with_progress(console, "operators and collectives", lambda step: calibrate(effort=BRIEF, on_progress=step))


def train_both(console: Console, processes: int) -> tuple[Training, Training]:
    """One plain process with a thread for every core that the others use, then these under their plan."""
    one = with_progress(
        console,
        f"1 process, {processes} threads ",
        lambda step: train(1, threads=processes, planned=False, on_step=lambda done: step(done, STEPS)),
        STEPS,
    )
    planned = with_progress(
        console,
        f"{processes} processes, planned",
        lambda step: train(processes, planned=True, on_step=lambda done: step(done, STEPS)),
        STEPS,
    )
    return one, planned


def show_training(console: Console, one: Training, planned: Training, plan: Plan, processes: int) -> None:
    """Losses and seconds of both, what they show, and what to type next."""
    console.print(comparison(plan, f"byte-level GPT on {plan.cluster}"))
    mesh = format_mesh(dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)))
    predicted = format_seconds(plan.predicted.step_seconds)
    rows = [
        (what, f"{run.losses[-1]:.6f}", format_seconds(run.step_seconds), said)
        for what, run, said in (
            (f"{processes} processes ({mesh})", planned, predicted),
            (f"1 process, {processes} threads", one, "-"),
        )
    ]
    console.print(table(f"after {len(one.losses)} steps", ("run", "loss", "measured step", "predicted step"), rows))
    for line in what_it_shows(one, planned, plan.predicted.step_seconds, processes):
        console.print(Text(line))


def what_it_shows(one: Training, planned: Training, predicted_seconds: float, processes: int) -> list[str]:
    """The sentences under the tables, with the next command."""
    ratio, error = one.step_seconds / planned.step_seconds, predicted_seconds / planned.step_seconds - 1.0
    pace = f"{ratio:.2f} times as fast as" if ratio >= 1.0 else f"{1.0 / ratio:.2f} times as slow as"
    lines = [
        f"The losses of {len(one.losses)} steps, from {one.losses[0]:.2f} to {one.losses[-1]:.2f}, agree within "
        f"{largest_difference(one, planned):.0e}: the plan computes what the model computes.",
        f"On the same {processes} cores {processes} processes are {pace} one process with {processes} threads; more "
        "processes pay where each brings a device of its own.",
        f"The predicted step is {format_share(abs(error))} {'above' if error > 0 else 'below'} the measured one.",
    ]
    busy = busy_share(one, planned, processes)
    if busy > MOST_BUSY:
        lines.append(
            f"This machine was busy: other processes took {format_share(busy)} of the CPU, so the measured seconds say "
            "little. End them and run the demo again."
        )
    return [*lines, f"Next: {NEXT}"]


def busy_share(one: Training, planned: Training, processes: int) -> float:
    """Share of the CPU that went to processes of others: more processes than cores take it from each other."""
    own = max(1.0, processes / usable_cores())
    return 1.0 - 1.0 / max(1.0, one.crowd, planned.crowd / own)


def largest_difference(one: Training, planned: Training) -> float:
    """Over all steps."""
    return max(abs(a - b) for a, b in zip(one.losses, planned.losses, strict=True))


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


def training_numbers(one: Training, planned: Training, processes: int) -> dict[str, Any]:
    """Losses and measured seconds of both runs."""
    return {
        "processes": processes,
        "loss_one_process": one.losses[-1],
        "loss_planned": planned.losses[-1],
        "largest_difference": largest_difference(one, planned),
        "measured_step_seconds": planned.step_seconds,
        "measured_step_seconds_one_process": one.step_seconds,
        "busy_share": busy_share(one, planned, processes),
    }
