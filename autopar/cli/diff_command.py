"""`autopar diff`: where two plan files part, and what each predicts."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from autopar.cli.output import as_json_option, print_document
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_summary import plan_columns, plan_row
from autopar.report.differences import changed_lines
from autopar.report.terminal_tables import table


@click.command()
@click.argument("this", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("other", type=click.Path(dir_okay=False, path_type=Path))
@as_json_option
def diff(this: Path, other: Path, as_json: bool) -> None:
    """Compare the plan files THIS and OTHER: figures side by side, then the choices that differ (--json: every one).

    Example: autopar diff plan.json tp4.json
    """
    plans = {path: Plan.load(path) for path in (this, other)}
    lines = changed_lines(plans[this], plans[other], (this.name, other.name))
    if as_json:
        steps = {str(path): plan.predicted.step_seconds for path, plan in plans.items()}
        every = plans[this].diff(plans[other]).splitlines()
        print_document({"step_seconds": steps, "equal": not every, "lines": every})
        return
    rows = [plan_row(str(path), plan) for path, plan in plans.items()]
    Console().print(table("plans", plan_columns(plans[this]), rows))
    click.echo("\n".join(lines) or "the same choices")
