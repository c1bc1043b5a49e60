"""Contrast of every pair of colours that a report puts on each other, as WCAG 2.2 counts it."""

from __future__ import annotations

import re
from pathlib import Path

import autopar.report.html.palette as palette
from autopar.report.html.page import TEMPLATES

TEXT, CONTROL = 4.5, 3.0
"""Success criteria 1.4.3 (AA) and 1.4.11."""


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def too_close(names: tuple[str, ...], least: float) -> list[tuple[str, str, str, float]]:
    return [
        (name, ground, palette.SCHEMES[scheme], found)
        for name in names
        for ground in palette.GROUNDS
        for scheme in range(len(palette.SCHEMES))
        if (found := contrast(palette.PALETTE[name][scheme], palette.PALETTE[ground][scheme])) < least
    ]


def test_texts_and_marks_stand_out_from_every_ground() -> None:
    assert contrast("#000000", "#ffffff") == 21.0
    assert round(contrast("#767676", "#ffffff"), 2) == 4.54  # the lightest grey on white that passes
    assert not too_close((*palette.TEXTS, *palette.MARKS), TEXT)
    assert not too_close(("control",), CONTROL)
    assert too_close(("line",), CONTROL)  # a line of a table tells nothing


def test_the_templates_name_no_colour_beside_the_palette() -> None:
    for path in Path(TEMPLATES).iterdir():
        text = path.read_text()
        assert not re.findall(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b(?=;)", text), path.name
        named = set(re.findall(r"var\(--([a-z]+)\)", text))
        assert named <= palette.PALETTE.keys(), path.name
    used = {*palette.PARTS, *palette.LAYOUTS, *palette.PASSES.values()}
    assert used <= set(palette.MARKS)
