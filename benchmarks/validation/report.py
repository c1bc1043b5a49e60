"""Scores as one table for people and as JSON.

kind        file              rows       t0                   t1                   physics   naive    must / goal
step time   e2e_vtrain_...    720/720    11.2 % [9.8, 12.9]   8.1 % [7.0, 9.4]     ...       48.0 %   15 / 3 %
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.validation.score import FIVE_CONSTANTS, NAIVE, TOGETHER, Score

GOALS: Mapping[str, str] = {
    "operator": "t1 12 / 3 %, t0 25 / 8 %",
    "collective small": "40 / 15 %",
    "collective mid": "25 / 8 %",
    "collective large": "15 / 4 %",
    "memory": "8 / 0.5 %, under never > 2 %",
    "memory, recomputed": "8 / 0.5 %, under never > 2 %",
    "memory, offloaded": "8 / 0.5 %, under never > 2 %",
    "memory, over that without the rung": "8 / 0.5 %",
    "OOM": "85 / 98 %, false fits 5 / 0.5 %",
    "step time": "15 / 3 %",
    "step, recomputed": "15 / 3 %",
    "step, offloaded": "15 / 3 %",
    "step, over that without the rung": "15 / 3 %",
    "shared attention": "15 / 5 %",
    "plan ranking": "tau 0.75 / 0.93, regret 8 / 1 %",
    "pipeline bubble": "1 / 0.02 points",
    "pipeline samples/s": "8 / 2.5 %",
    "pipeline memory": "10 / 2 %",
}
"""Must / goal of each kind."""

COMPARED = ("physics", NAIVE, FIVE_CONSTANTS)
COLUMNS = ("t0", "t1", *COMPARED)
"""The tiers with their intervals, and what they are compared with."""
WIDTH = 220


def as_table(scores: Sequence[Score]) -> str:
    """The scores, one line per kind and file; a cell holds the headline, its 95 % interval and what stands beside."""
    table = RichTable(box=None, header_style="bold", pad_edge=False)
    for column in ("kind", "file", "rows", *COLUMNS, "must / goal"):
        table.add_column(column, no_wrap=column in ("kind", "file", "rows"))
    lines: dict[tuple[str, str], dict[str, Score]] = {}
    for score in scores:
        lines.setdefault((score.kind, score.file), {})[score.tier] = score
    for kind in dict.fromkeys(score.kind for score in scores):
        files = sorted((file for known, file in lines if known == kind), key=lambda file: (file == TOGETHER, file))
        for file in files:
            tiers = lines[kind, file]
            best = max(tiers.values(), key=lambda score: (score.tier not in COMPARED, score.scored))
            cells = [_cell(tiers.get(column)) for column in COLUMNS]
            table.add_row(kind, file, f"{best.scored}/{best.rows}", *cells, GOALS[kind])
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _cell(score: Score | None) -> str:
    """Headline, interval (of the tiers only) and what stands beside."""
    if score is None or not score.scored:
        return "-"
    headline = _number(score.kind, score.error)
    if score.tier not in COMPARED:
        headline += f" [{_plain(score.kind, score.low)}, {_plain(score.kind, score.high)}]"
    return f"{headline} {_beside(score)}".rstrip()


def _number(kind: str, value: float) -> str:
    unit = "" if kind == "plan ranking" else " pt" if kind == "pipeline bubble" else " %"
    return f"{_plain(kind, value)}{unit}"


def _plain(kind: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    if kind == "plan ranking":
        return f"{value:.2f}"
    return f"{value:.3f}" if kind == "pipeline bubble" else f"{100 * value:.1f}"


def _beside(score: Score) -> str:
    details = score.details
    if score.kind == "plan ranking":
        return f"regret {100 * details['regret']:.1f} %, top-3 {100 * details['top_3']:.0f} %"
    if score.kind == "OOM":
        return f"false fits {100 * details['false_fits']:.1f} %"
    if score.kind.split(",")[0] == "memory":
        return f"p90 {100 * details['p90']:.1f}, under {100 * details['largest_under_prediction']:.1f}"
    return f"p90 {100 * details['p90']:.1f}" if "p90" in details else ""


def as_json(scores: Sequence[Score], arguments: Sequence[str]) -> dict[str, Any]:
    """The scores and the command that made them; values that are not numbers are null."""
    return {
        "command": " ".join(["python -m benchmarks.validation", *_public(arguments)]),
        "python": sys.version.split()[0],
        "goals": dict(GOALS),
        "scores": [_defined(asdict(score)) for score in scores],
    }


def _public(arguments: Sequence[str]) -> list[str]:
    """The arguments without folders of this machine."""
    hidden = False
    shown = []
    for argument in arguments:
        shown.append("FOLDER" if hidden else argument)
        hidden = argument in ("--data", "--output")
    return shown


def _defined(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _defined(member) for key, member in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
