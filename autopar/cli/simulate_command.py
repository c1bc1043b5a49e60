"""`autopar simulate`: play the step of a plan file, and write it as a trace.

autopar plan hf:config.json --cluster "2x8 H100-SXM" --dims pp=4,dp_shard=4 -o plan.json
autopar simulate plan.json --trace step.json            # opens in chrome://tracing and ui.perfetto.dev
autopar simulate plan.json --trace both.json --measured rank0.json --measured rank1.json     # beside a measured step
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from autopar.capture import Captures, normalize_example_inputs
from autopar.cli.bound_plan import cluster_of, given_options, model_of, said_and_given
from autopar.cli.options import OPTIMIZERS, OUTPUT_FILE
from autopar.cli.output import as_json_option, print_document
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from autopar.planner.batch.micro_batch_program import planned_parts
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes, format_seconds
from autopar.program import MicroProgram, Program
from autopar.questions import capture_model
from autopar.report.measured import write_side_by_side
from autopar.report.progress_line import progress_line
from autopar.report.terminal_tables import table
from autopar.request import Request
from autopar.rules.learning import adopt_rules
from autopar.simulation.played_plan import Simulation, checked_step, simulate_step
from autopar.simulation.step_program import StepProgram

COLUMNS = ("", "simulated", "predicted by the planner")


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--trace", type=OUTPUT_FILE, help="Where a Chrome trace is written.")
@click.option(
    "--measured",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    help="A rank's trace of torch.profiler, to stand beside in --trace; once per rank.",
)
@given_options
@as_json_option
def simulate(path: Path, trace: Path | None, measured: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Play one step of the plan file PATH: seconds, exposed communication, bubble, peak memory.

    Example: autopar simulate plan.json --trace step.json
    """
    if measured and trace is None:
        raise ConfigurationError("--measured has nowhere to go: give --trace, the file for both steps")
    plan = Plan.load(path)
    with progress_line():
        found = simulated(plan, given)
    if trace is not None and measured:
        write_side_by_side(trace, found.timeline, measured)
    elif trace is not None:
        found.timeline.write_chrome_trace(trace)
    if as_json:
        print_document(document(found))
    else:
        Console().print(table(str(path), COLUMNS, rows(found)))


def simulated(plan: Plan, given: Mapping[str, Any]) -> Simulation:
    """The played step of a plan file, as of `step_of`."""
    return simulate_step(step_of(plan, given))


def step_of(plan: Plan, given: Mapping[str, Any]) -> StepProgram:
    """The step of a plan file. given: "model", "batch", "seq" and "cluster" in place of what the plan says of them."""
    said = said_and_given(plan, given)
    cluster = cluster_of(plan, said, given)
    optimizer = said.get("optimizer")
    return checked_step(plan, program_of(plan, given, cluster), cluster, OPTIMIZERS.get(str(optimizer), optimizer))


def program_of(plan: Plan, given: Mapping[str, Any], cluster: Cluster) -> Program | MicroProgram:
    """The captured program that a plan speaks of. Raises ConfigurationError where nothing says the model."""
    model, inputs = model_of(plan, given)
    said = said_and_given(plan, given)
    request = Request(cluster=cluster, precision=said.get("precision"), reduce_dtype=said.get("reduce_dtype"))
    captured = capture_model(model, *normalize_example_inputs(inputs), request, Captures())
    adopt_rules(captured.program, plan.discovered)
    if plan.in_one_part:
        return captured.program
    parts = planned_parts(captured.program, plan.micro_batches, captured, kernels=plan.kernels)
    adopt_rules(parts.program, plan.discovered)
    return parts


def document(found: Simulation) -> dict[str, Any]:
    """What `--json` prints; seconds and bytes."""
    predicted = found.plan.predicted
    return {
        "step_seconds": found.step_seconds,
        "compute_seconds": found.compute_seconds,
        "exposed_communication_seconds": found.exposed_communication_seconds,
        "bubble_rate": found.bubble_rate,
        "peak_bytes": list(found.peak_bytes),
        "predicted_step_seconds": predicted.step_seconds,
        "predicted_peak_bytes": predicted.peak_bytes,
    }


def rows(found: Simulation) -> list[tuple[str, str, str]]:
    """Cells of the table, under `COLUMNS`."""
    predicted = found.plan.predicted
    peaks = [format_bytes(peak) for peak in found.peak_bytes]
    return [
        ("step", format_seconds(found.step_seconds), format_seconds(predicted.step_seconds)),
        ("compute", format_seconds(found.compute_seconds), format_seconds(predicted.compute_seconds)),
        (
            "exposed communication",
            format_seconds(found.exposed_communication_seconds),
            format_seconds(predicted.exposed_communication_seconds),
        ),
        ("bubble", f"{found.bubble_rate:.1%}", ""),
        ("peak memory" + ("" if len(peaks) == 1 else " of rank groups"), ", ".join(peaks),
         format_bytes(predicted.peak_bytes)),
    ]  # fmt: skip
