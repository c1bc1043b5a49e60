"""A bar shows how many are done of how many, and hands back what the work returns."""

from __future__ import annotations

import io

from rich.console import Console

from autopar.report.progress_bars import OnProgress, with_progress


def test_the_last_state_of_a_bar_stands_in_the_output() -> None:
    def work(step: OnProgress) -> str:
        step(3, 4)
        return "done"

    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert with_progress(console, "operators", work) == "done"
    assert isinstance(console.file, io.StringIO)
    page = console.file.getvalue()
    assert "operators" in page
    assert "3/4" in page
