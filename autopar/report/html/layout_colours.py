"""Layout colours of a report: one number per layout, the same in the tree of the model and in every picture.

    colours = LayoutColours(plan.layout_mesh)
    colours.of(layout)         0: whole on every device, 1 to 8: splits as they appear, 9: a sum that is not complete
"""

from __future__ import annotations

from autopar.layouts.placement import Layout, Mesh
from autopar.plans.plan_text import format_placements
from autopar.report.html.palette import LAYOUTS

REPLICATED, PARTIAL = 0, len(LAYOUTS) - 1
SPLITS = len(LAYOUTS) - 2
"""Splits with a colour of their own; later ones take those of the first again."""


class LayoutColours:
    """Gives every layout its number in the style sheet (`layout-3`), in the order in which they are asked for."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._splits: dict[str, int] = {}

    def of(self, layout: Layout) -> int:
        """The number of a layout."""
        return self.of_text(format_placements(layout, self._mesh))

    def of_text(self, text: str) -> int:
        """The number of a layout as `format_placements` writes it."""
        if text == "R":
            return REPLICATED
        if "P(" in text:
            return PARTIAL
        return 1 + self._splits.setdefault(text, len(self._splits) % SPLITS)

    @property
    def legend(self) -> list[tuple[str, int]]:
        """(layout, number) of the splits with a colour of their own."""
        return [(text, 1 + colour) for text, colour in list(self._splits.items())[:SPLITS]]
