"""The colours of a report, as data: every name with its colour on a light and on a dark ground.

The style sheet is written from it, and `tests/report/test_palette.py` computes the contrast of every pair: text on its
ground at least 4.5 to 1, as WCAG 2.2 AA asks. Marks (bars, cells, kinds of memory, layouts) keep the same distance, so
that text in the colour of the ground can stand on them. A colour never says alone what a mark means.
"""

from __future__ import annotations

from collections.abc import Mapping

SCHEMES = ("light", "dark")
PALETTE: Mapping[str, tuple[str, str]] = {
    "ground": ("#ffffff", "#14171b"),
    "panel": ("#f5f7f9", "#1d2228"),
    "line": ("#d8dde3", "#333a42"),
    "control": ("#7b8593", "#7b8593"),
    "ink": ("#1b1f24", "#e4e8ec"),
    "faint": ("#5a6472", "#a3adb9"),
    "link": ("#1f5a9c", "#7fb4ee"),
    "blue": ("#2f6fb5", "#5b9be0"),
    "orange": ("#a8560a", "#e39a4c"),
    "green": ("#2a7a52", "#5dbb8a"),
    "magenta": ("#b03a78", "#e07fb0"),
    "violet": ("#6a57c0", "#a596ec"),
    "olive": ("#7a6810", "#cbb457"),
    "teal": ("#1b7484", "#5cc0cf"),
    "grey": ("#667080", "#a3a9b3"),
    "red": ("#b0452f", "#e58a76"),
    "moss": ("#4f6d2c", "#9cbf6d"),
}
"""Name -> colour on a light and on a dark ground. control: the edges of what can be operated."""

GROUNDS = ("ground", "panel")
TEXTS = ("ink", "faint", "link")
MARKS = ("blue", "orange", "green", "magenta", "violet", "olive", "teal", "grey", "red", "moss")
PARTS = ("blue", "orange", "green", "magenta", "violet", "olive", "teal", "grey")
"""Colours of kinds that stand beside each other, in this order."""
LAYOUTS = ("grey", "blue", "green", "magenta", "violet", "olive", "teal", "red", "moss", "orange")
"""Whole on every device; the splits in the order in which they appear; a sum that is not complete."""
PASSES: Mapping[str, str] = {"F": "green", "B": "blue", "I": "teal", "W": "violet", "once": "olive", "moves": "orange"}
"""Of the passes of a schedule, and of what runs once per step."""
