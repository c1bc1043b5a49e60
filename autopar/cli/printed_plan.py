"""A plan as `autopar plan` and `autopar show` print it."""

from __future__ import annotations

import click
from rich.console import Console

from autopar.plans.parallel_plan import Plan
from autopar.report.terminal_tables import page


def print_plan(found: Plan, as_json: bool) -> None:
    """The plan as JSON, or as tables."""
    if as_json:
        click.echo(found.to_json().decode())
    else:
        Console().print(page(found))
