"""Progress bars of what is counted: a name, a bar, how many of how many, and the seconds so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

OnProgress: TypeAlias = Callable[[int, int], None]
"""Takes how many are done, of how many."""
Result = TypeVar("Result")


def with_progress(
    console: Console, what: str, work: Callable[[OnProgress], Result], total: int | None = None
) -> Result:
    """Run `work` with a function that moves a bar called `what`. total: None where only `work` knows it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(what, total=total)
        return work(lambda done, of: progress.update(bar, completed=done, total=of))
