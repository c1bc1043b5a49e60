"""`autopar report`: a plan file as one HTML page.

autopar report plan.json -o plan.html                        # the plan alone
autopar report plan.json -o plan.html --simulate             # with its simulated step
autopar report plan.json -o plan.html --trace step.json      # with a step that `autopar simulate --trace` wrote
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopar.cli.bound_plan import trust_option
from autopar.cli.options import OUTPUT_FILE
from autopar.cli.output import as_json_option, print_document
from autopar.errors import ConfigurationError
from autopar.later import later
from autopar.plans.parallel_plan import Plan
from autopar.report.html.page import Played, write_report
from autopar.report.html.timeline import RecordedStep, read_timeline

if TYPE_CHECKING:
    from autopar.explain.memory_over_time import MemoryOverTime
    from autopar.explain.repeated_block import RepeatedBlock
    from autopar.simulation.played_plan import Simulation
    from autopar.simulation.step_program import StepProgram

step_of: Callable[..., StepProgram] = later("autopar.cli.simulate_command", "step_of")
simulate_step: Callable[[StepProgram], Simulation] = later("autopar.simulation.played_plan", "simulate_step")
memory_over_time: Callable[..., list[MemoryOverTime]] = later("autopar.explain.memory_over_time", "memory_over_time")
repeated_block: Callable[..., RepeatedBlock | None] = later("autopar.explain.repeated_block", "repeated_block")


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=OUTPUT_FILE, help="Default: PATH with .html.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="A step that `simulate` wrote.")
@click.option("--simulate", is_flag=True, help="Capture the model that the plan names, and play its step.")
@trust_option
@as_json_option
def report(path: Path, output: Path | None, trace: Path | None, simulate: bool, trust: bool, as_json: bool) -> None:
    """Write the plan file PATH as one HTML page that opens from disk.

    Example: autopar report plan.json -o plan.html
    """
    if trace is not None and simulate:
        raise ConfigurationError("--trace and --simulate both give the step: leave one out")
    plan, target = Plan.load(path), output or path.with_suffix(".html")
    played: Played = {"timeline": None if trace is None else read_timeline(trace)}
    write_report(plan, target, **(_simulated(plan, trust) if simulate else played))
    if as_json:
        print_document({"report": str(target), "bytes": target.stat().st_size})
    else:
        click.echo(f"{target}: {target.stat().st_size / 1e6:.2f} MB")


def _simulated(plan: Plan, trust: bool) -> Played:
    """The simulated step, with what only the model behind the plan tells."""
    step = step_of(plan, {"trust": trust})
    timeline = simulate_step(step).timeline
    return {
        "timeline": RecordedStep.of(timeline),
        "memory": memory_over_time(step, timeline),
        "block": repeated_block(step),
    }
