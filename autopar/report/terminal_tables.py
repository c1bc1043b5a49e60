"""A plan drawn for a terminal. What stands in the cells comes from `autopar.plans.plan_text`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_summary import (
    LARGEST_GROUPS,
    facts,
    legend,
    parameter_rows,
    plan_columns,
    plan_rows,
)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Rows of text under a title; the first row is the one that matters most."""
    drawn = _plain_table(title, columns)
    for index, row in enumerate(rows):
        drawn.add_row(*row, style="bold green" if index == 0 else None)
    return drawn


def comparison(plan: Plan, title: str = "plans") -> Table:
    """The chosen plan beside its baselines."""
    return table(title, plan_columns(plan), plan_rows(plan))


def page(plan: Plan, verbose: bool = False) -> Group:
    """What `Plan.summary()` says behind its first two lines."""
    rows = parameter_rows(plan)
    parts: list[RenderableType] = [comparison(plan), Text("\n".join(facts(plan, verbose)))]
    layouts = _plain_table("parameters", ("parameters", "count", "layout"))
    for row in rows[:LARGEST_GROUPS]:
        layouts.add_row(*row)
    parts.append(layouts)
    if len(rows) > LARGEST_GROUPS:
        parts.append(Text(f"... and {len(rows) - LARGEST_GROUPS} more groups"))
    parts.append(Text(legend(plan), style="dim"))
    return Group(*parts)


def _plain_table(title: str, columns: Sequence[str]) -> Table:
    """Columns without lines, so that a page of plans fits 80 characters."""
    drawn = Table(
        title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False
    )
    for column in columns:
        drawn.add_column(column, overflow="fold")
    return drawn
