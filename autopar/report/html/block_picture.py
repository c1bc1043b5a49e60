"""A repeated block of a report as a diagram: boxes for what its modules make, arrows along the values.

    +------------------+
    | mlp.down_proj    |      the bar at the left has the colour of the layout, which stands beside it in words
    |# P(sum)          |
    +------------------+
    ( reduce_scatter over tp, 0.36 ms )         what moves an activation stands below the box that made it
             |
    +------------------+

Parts that depend on equally many others stand beside each other; arrows past a row run along the left edge.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.plans.plan_text import format_seconds
from autopar.report.html.layout_colours import LayoutColours

if TYPE_CHECKING:
    from autopar.explain.repeated_block import BlockCollective, BlockPart, RepeatedBlock

BOX, LINE, GAP, PADDING, GUTTER = 320, 17, 26, 9, 14
"""Pixels: width of a box, height of a line of text, between boxes, inside of a box, between arrows past a row."""
LONGEST = 46
"""Characters of a line that a box has room for; the whole line stands in the table."""


@dataclass(frozen=True, slots=True)
class DrawnLine:
    """A line of text, and the class of the mark in front of it ("" where there is none)."""

    x: int
    y: int
    text: str
    mark: str
    is_name: bool = False


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A part (style "part") or what moves its value ("moved"). layout: number of the colour of its bar."""

    x: int
    y: int
    height: int
    style: str
    layout: int
    lines: tuple[DrawnLine, ...]


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A part as a row of the table beside the diagram."""

    name: str
    layout: str
    reads: str
    weights: str
    forward: str
    backward: str
    collectives: str


@dataclass(frozen=True, slots=True)
class BlockPicture:
    """The diagram. arrows: SVG paths; rows: the same as a table; seconds: of all that is in it."""

    pattern: str
    name: str
    count: int
    seconds: float
    left_seconds: float
    width: int
    height: int
    box: int
    boxes: tuple[DrawnBox, ...]
    arrows: tuple[str, ...]
    rows: tuple[BlockRow, ...]
    legend: tuple[tuple[str, int], ...]


def block_picture(block: RepeatedBlock, colours: LayoutColours) -> BlockPicture:
    """Place the parts of a block."""
    depths = _depths(block.parts)
    rows: dict[int, list[int]] = defaultdict(list)
    for place, depth in enumerate(depths):
        rows[depth].append(place)
    skips = [(source, target) for target, part in enumerate(block.parts) for source in part.reads
             if depths[target] - depths[source] > 1]  # fmt: skip
    left = GUTTER * (1 + len(skips))
    boxes: list[DrawnBox] = []
    ends: dict[int, tuple[int, int, int]] = {}
    y = 2
    for depth in sorted(rows):
        lowest = y
        for column, place in enumerate(rows[depth]):
            own = _boxes(block.parts[place], left + column * (BOX + GAP), y, colours)
            boxes += own
            bottom = own[-1].y + own[-1].height
            ends[place] = (own[0].x + BOX // 2, y, bottom)
            lowest = max(lowest, bottom)
        y = lowest + GAP
    widest = max(map(len, rows.values()))
    return BlockPicture(
        pattern=block.pattern, name=block.name, count=block.count, seconds=block.seconds,
        left_seconds=block.left_seconds, width=left + widest * (BOX + GAP), height=y - GAP + 4, box=BOX,
        boxes=tuple(boxes), arrows=tuple(_arrows(block.parts, ends, skips)),
        rows=tuple(_row(block, part) for part in block.parts), legend=_legend(block, colours),
    )  # fmt: skip


def _depths(parts: tuple[BlockPart, ...]) -> list[int]:
    """Of every part, how many others it is behind on the longest way."""
    found: dict[int, int] = {}

    def depth(place: int) -> int:
        if place not in found:
            found[place] = 1 + max((depth(source) for source in parts[place].reads), default=-1)
        return found[place]

    return [depth(place) for place in range(len(parts))]


def _boxes(part: BlockPart, x: int, y: int, colours: LayoutColours) -> list[DrawnBox]:
    """The box of a part, and one below it for what moves its value."""
    own = [(part.name, "", True)]
    if part.layout:
        own.append((part.layout, f"mark-{colours.of_text(part.layout)}", False))
    if part.forward_seconds or part.backward_seconds:
        own.append((f"forward {_time(part.forward_seconds)}, backward {_time(part.backward_seconds)}", "", False))
    own += [(f"{name}: {layout}", f"mark-{colours.of_text(layout)}", False) for name, layout in part.weights]
    own += [(_in_words(one), "moves", False) for one in part.collectives if one.moves_weight]
    boxes = [_box(x, y, "part", colours.of_text(part.layout) if part.layout else 0, own)]
    moved = [(_in_words(one), "moves", False) for one in part.collectives if not one.moves_weight]
    if moved:
        boxes.append(_box(x, y + boxes[0].height + 4, "moved", 0, moved))
    return boxes


def _box(x: int, y: int, style: str, layout: int, lines: list[tuple[str, str, bool]]) -> DrawnBox:
    drawn = [
        DrawnLine(x + 14, y + PADDING + 11 + LINE * place, _short(text), mark, is_name)
        for place, (text, mark, is_name) in enumerate(lines)
    ]
    return DrawnBox(x, y, 2 * PADDING + LINE * len(lines) - 2, style, layout, tuple(drawn))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"


def _in_words(one: BlockCollective) -> str:
    """ "all_gather over tp, 0.36 ms"; of backward with the word in front."""
    backward = "backward: " if one.phase == "backward" else ""
    return f"{backward}{one.kind} {one.axes} {format_seconds(one.seconds)}"


def _arrows(
    parts: tuple[BlockPart, ...], ends: dict[int, tuple[int, int, int]], skips: list[tuple[int, int]]
) -> list[str]:
    """From the bottom of what is read to the top of what reads it; (middle, top, bottom) of every part in `ends`."""
    found = []
    for target, part in enumerate(parts):
        for source in part.reads:
            (from_x, _, from_y), (to_x, to_y, _) = ends[source], ends[target]
            if (source, target) in skips:
                lane = GUTTER * (1 + skips.index((source, target)))
                found.append(f"M{from_x - 40},{from_y}v8H{lane}V{to_y - 10}H{to_x - 40}v8")
            else:
                middle = (from_y + to_y) / 2
                found.append(f"M{from_x},{from_y}C{from_x},{middle:g} {to_x},{middle:g} {to_x},{to_y - 2}")
    return found


def _row(block: RepeatedBlock, part: BlockPart) -> BlockRow:
    return BlockRow(
        name=part.name, layout=part.layout, reads=", ".join(block.parts[source].name for source in part.reads),
        weights=", ".join(f"{name} {layout}" for name, layout in part.weights), forward=_time(part.forward_seconds),
        backward=_time(part.backward_seconds), collectives="; ".join(map(_whole, part.collectives)),
    )  # fmt: skip


def _whole(one: BlockCollective) -> str:
    what = " of weights" if one.moves_weight else ""
    into = f" into {one.layout}" if one.layout else ""
    return f"{_in_words(one)}{what}{into}"


def _legend(block: RepeatedBlock, colours: LayoutColours) -> tuple[tuple[str, int], ...]:
    texts = [part.layout for part in block.parts if part.layout]
    texts += [layout for part in block.parts for _, layout in part.weights]
    return tuple((text, colours.of_text(text)) for text in dict.fromkeys(texts))
