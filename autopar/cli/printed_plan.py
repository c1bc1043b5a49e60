"""A plan as `autopar plan`, `show` and `import` print it: what it is in three lines, then the known plans beside it."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_summary import beside_known_plans, headline
from autopar.report.terminal_tables import page

verbose_option = click.option("-v", "--verbose", is_flag=True, help="Also what the search counted and did.")


def print_plan(found: Plan, as_json: bool, verbose: bool = False, last_line: str = "") -> None:
    """The plan as JSON, or its lines and tables. last_line: behind the first two, what became of the plan."""
    if as_json:
        click.echo(found.to_json().decode())
        return
    click.secho(headline(found), bold=True)
    click.echo(beside_known_plans(found))
    if last_line:
        click.echo(last_line)
    click.echo()
    Console().print(page(found, verbose))


def what_became_of(output: Path | None) -> str:
    """That the plan was written, or how to keep it."""
    return "not written: -o plan.json keeps it" if output is None else f"wrote {output}"
