"""The rows of `scaling` as bars in an SVG: simulated step over that of our plan, one group of bars per row.

plot([{"name": "llama3-8b@64", "autopar_seconds": 1.0, "ddp_seconds": None, ...}])      # "<svg ...>"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

COLOURS = {"autopar": "#1f6feb", "megatron": "#8c6bb1", "expert": "#d95f0e", "zero3": "#41ab5d", "ddp": "#bdbdbd"}
BAR, GAP, HEIGHT, LEFT, TOP, BELOW = 16, 22, 220, 40, 34, 46
ENTRY = 90
"""Width of a word of the legend."""
CAPTION = "simulated step over that of autopar's plan; x: does not fit"
CUT = 3.0
"""Longer bars end here, with their number on top."""


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture. Plans that do not fit have no bar, but a cross."""
    group = len(COLOURS) * BAR + GAP
    width, height = LEFT + max(group * len(rows) + GAP, ENTRY * len(COLOURS)), TOP + HEIGHT + BELOW
    parts = [_legend(), _scale(width)]
    for number, row in enumerate(rows):
        left = LEFT + GAP + number * group
        parts += [_bar(row, plan, left + BAR * place) for place, plan in enumerate(COLOURS)]
        parts.append(_text(left + (group - GAP) / 2, TOP + HEIGHT + 18, row["name"], anchor="middle"))
    parts.append(_text(width / 2, TOP + HEIGHT + 38, CAPTION, anchor="middle"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="10">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _bar(row: Mapping[str, Any], plan: str, left: float) -> str:
    seconds = row[f"{plan}_seconds"]
    middle, bottom = left + BAR / 2, TOP + HEIGHT
    if seconds is None:
        return _text(middle, bottom - 3, "x", anchor="middle")
    ratio = float(seconds) / float(row["autopar_seconds"])
    tall = min(ratio, CUT) / CUT * HEIGHT
    title = f"<title>{escape(row['name'])}, {plan}: {seconds:.3f} s</title>"
    rectangle = (
        f'<rect x="{left:g}" y="{bottom - tall:.1f}" width="{BAR - 2}" height="{tall:.1f}" fill="{COLOURS[plan]}">'
        f"{title}</rect>"
    )
    return rectangle + (_text(middle, bottom - tall - 3, f"{ratio:.1f}", anchor="middle") if ratio > CUT else "")


def _scale(width: float) -> str:
    lines = []
    for value in (1.0, 2.0, CUT):
        y = TOP + HEIGHT - value / CUT * HEIGHT
        lines.append(f'<line x1="{LEFT}" x2="{width - GAP:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(_text(LEFT - 6, y + 3, f"{value:g}", anchor="end"))
    return "\n".join(lines)


def _legend() -> str:
    return "\n".join(
        f'<rect x="{LEFT + ENTRY * n}" y="8" width="10" height="10" fill="{colour}"/>'
        + _text(LEFT + ENTRY * n + 14, 17, plan)
        for n, (plan, colour) in enumerate(COLOURS.items())
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
