"""Stages and micro-batches of a report, as a grid over time: a row per rank group, a cell per pass.

    group 0   0F0 0F1 0F2 0F3 ...   0B0 ... optimizer       "2F5": stage 2, forward of micro-batch 5
    group 1       1F0 1F1 1F2 ...

Cells begin and end as the played step says; what nothing covers is a bubble, or waiting for a message.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from autopar.cost_models.chrome_trace import Span
from autopar.cost_models.simulator import COMPUTE_STREAM
from autopar.plans.plan_text import format_seconds
from autopar.report.html.timeline import MESSAGE, RecordedStep

PASS = re.compile(r"(\d+)([FBIW])(\d+)(?: (?!-> )|$)")
"""The pass that a span of a played pipeline belongs to; a message between stages ("0F0 -> 1") belongs to none."""
WIDTH, ROW, DIGIT = 1040, 30, 7
"""Pixels of the grid, of a row, and of a digit of the number in a cell."""
KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "once": "once per step: optimizer and others",
    "moves": "communication once per step: gathers, late sums",
}


@dataclass(frozen=True, slots=True)
class GridCell:
    """A pass: its place in pixels, the micro-batch where there is room for it, and what it is in words."""

    kind: str
    x: float
    width: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class GridRow:
    """A rank group. order: the names of its passes as they begin."""

    group: int
    y: int
    cells: tuple[GridCell, ...]
    order: str


@dataclass(frozen=True, slots=True)
class StageGrid:
    """The grid. kinds: (class in the style sheet, name) of the passes that occur."""

    rows: tuple[GridRow, ...]
    seconds: float
    width: int
    height: int
    kinds: tuple[tuple[str, str], ...]


def stage_grid(step: RecordedStep) -> StageGrid | None:
    """The grid of a played pipeline; None where no pass has a name, as in a step without stages."""
    passes: dict[int, dict[tuple[str, str, str], list[Span]]] = defaultdict(lambda: defaultdict(list))
    once: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in step.spans:
        found = PASS.match(span.name)
        if found is not None:
            passes[span.rank][found.group(1), found.group(2), found.group(3)].append(span)
        elif MESSAGE not in span.name and span.end_seconds > span.start_seconds:
            once[span.rank, "once" if span.stream == COMPUTE_STREAM else "moves"].append(span)
    if not passes:
        return None
    rows = tuple(
        _row(place, rank, passes[rank], {kind: once[rank, kind] for kind in ("moves", "once")}, step)
        for place, rank in enumerate(sorted(passes))
    )
    occurring = {cell.kind for row in rows for cell in row.cells}
    kinds = tuple((kind, name) for kind, name in KINDS.items() if kind in occurring)
    return StageGrid(rows, step.seconds, WIDTH, ROW * len(rows), kinds)


def _row(
    place: int,
    rank: int,
    passes: dict[tuple[str, str, str], list[Span]],
    once: dict[str, list[Span]],
    step: RecordedStep,
) -> GridRow:
    cells = [_cell(kind, batch, f"{stage}{kind}{batch}", f"stage {stage}, {KINDS[kind]} of micro-batch {batch}",
                   spans, step.seconds) for (stage, kind, batch), spans in passes.items()]  # fmt: skip
    for kind, spans in once.items():
        joined = _joined(spans, step.seconds / WIDTH)
        cells += [_cell(kind, "", "", span.name, [span], step.seconds) for span in joined]
    cells.sort(key=lambda cell: cell.x)
    names = [cell.title.partition(":")[0] for cell in cells if cell.kind not in once]
    return GridRow(rank, place * ROW, tuple(cells), " ".join(names))


def _cell(kind: str, label: str, name: str, what: str, spans: list[Span], whole: float) -> GridCell:
    start, end = min(span.start_seconds for span in spans), max(span.end_seconds for span in spans)
    x, width = start / whole * WIDTH, (end - start) / whole * WIDTH
    times = f"{format_seconds(start)} to {format_seconds(end)}"
    title = f"{name}: {what}, {times}" if name else f"{what}, {times}"
    return GridCell(kind, round(x, 2), round(width, 2), label if width >= DIGIT * (1 + len(label)) else "", title)


def _joined(spans: list[Span], closest: float) -> list[Span]:
    """Neighbours that lie closer than a pixel as one span."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_seconds):
        if found and span.start_seconds - found[-1].end_seconds < closest:
            last = found.pop()
            name = last.name if last.name.endswith(" ...") else f"{last.name} ..."
            found.append(Span(rank=span.rank, stream=span.stream, name=name, start_seconds=last.start_seconds,
                              end_seconds=max(last.end_seconds, span.end_seconds)))  # fmt: skip
        else:
            found.append(span)
    return found
