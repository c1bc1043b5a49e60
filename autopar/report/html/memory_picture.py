"""Memory over time of a report, stacked by kind: one area per kind and rank, what lives throughout at the bottom.

Areas lie in a box of WIDTH x HEIGHT whose height is the largest peak of all ranks, so that ranks can be compared; that
of what they have on the host has a height of its own. What backward computes again or has brought from the host is a
kind by itself, so the picture shows the rungs of the memory ladder. What is held in front of the first pass is drawn as
the first moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.plans.plan_text import format_bytes
from autopar.report.html.palette import MARKS

if TYPE_CHECKING:
    from autopar.explain.memory_over_time import MemoryOverTime

WIDTH, HEIGHT = 1000, 140


@dataclass(frozen=True, slots=True)
class MemoryLayer:
    """One kind of memory: its mark in the style sheet, its area as an SVG path, and its bytes at the peak."""

    kind: str
    mark: int
    path: str
    bytes_at_peak: float


@dataclass(frozen=True, slots=True)
class MemoryPicture:
    """What one rank, `name`, holds over a step. peak_seconds: when its fullest moment begins."""

    name: str
    peak_bytes: float
    peak_seconds: float
    seconds: float
    layers: tuple[MemoryLayer, ...]


@dataclass(frozen=True, slots=True)
class KindRow:
    """A kind of memory in the table: bytes at the peak of every rank."""

    kind: str
    mark: int
    cells: tuple[str, ...]


def memory_pictures(memory: Sequence[MemoryOverTime]) -> list[MemoryPicture]:
    """A picture per rank; a kind has the same mark in all of them."""
    marks = kind_marks(memory)
    is_alone = all(one.group == memory[0].group for one in memory)
    found = []
    for one in memory:
        highest = max(other.peak_bytes for other in memory if other.on_host == one.on_host)
        name = f"rank {one.rank}" if is_alone else f"group {one.group}"
        if highest:
            found.append(_picture(f"{name}, on the host" if one.on_host else name, one, marks, highest))
    return found


def kind_marks(memory: Sequence[MemoryOverTime]) -> dict[str, int]:
    """Kind -> number of its mark in the style sheet, in the order in which kinds are stacked."""
    kinds = dict.fromkeys(kind for one in memory for kind in one.kinds)
    return {kind: place % len(MARKS) for place, kind in enumerate(kinds)}


def kind_rows(pictures: Sequence[MemoryPicture]) -> list[KindRow]:
    """The same as a table: kinds by ranks."""
    marks = {layer.kind: layer.mark for picture in pictures for layer in picture.layers}
    at_peak = [{layer.kind: layer.bytes_at_peak for layer in picture.layers} for picture in pictures]
    return [
        KindRow(kind, mark, tuple(format_bytes(own[kind]) if own.get(kind) else "-" for own in at_peak))
        for kind, mark in marks.items()
    ]


def _picture(name: str, memory: MemoryOverTime, marks: dict[str, int], highest: float) -> MemoryPicture:
    peak_seconds, at_peak = memory.peak
    edges = [0.0, *(start / memory.seconds * WIDTH for start, _ in memory.moments[1:]), float(WIDTH)]
    below = [0.0] * len(memory.moments)
    layers = []
    for kind, mark in marks.items():
        above = [base + by_kind.get(kind, 0.0) for base, (_, by_kind) in zip(below, memory.moments, strict=True)]
        if above != below:
            layers.append(MemoryLayer(kind, mark, _area(edges, below, above, highest), at_peak.get(kind, 0.0)))
        below = above
    return MemoryPicture(name, memory.peak_bytes, peak_seconds, memory.seconds, tuple(layers))


def _area(edges: Sequence[float], below: Sequence[float], above: Sequence[float], highest: float) -> str:
    """Steps along the upper edge to the right, and along the lower one back."""
    upper = "".join(f"V{_height(value, highest)}H{end:.1f}" for value, end in zip(above, edges[1:], strict=True))
    lower = "".join(
        f"V{_height(value, highest)}H{start:.1f}"
        for value, start in zip(reversed(below), reversed(edges[:-1]), strict=True)
    )
    return f"M{edges[0]:.1f},{_height(below[0], highest)}{upper}{lower}Z"


def _height(value: float, highest: float) -> str:
    return f"{HEIGHT * (1.0 - value / highest):.2f}"
