"""Bounds under hidden shares: what solves under some shares prove for the others, on the same mesh.

    h(0) = 0.65 s, h(0.9) = 0.29 s, both proven      ->      h(0.5) is at least 0.45 s, without a solve

Under share s a plan costs c - s p: all its seconds less a part of those that move parameters, p >= 0. So the optimum
h(s) = min over plans of (c - s p) falls with s and is concave, whatever the plans are: between two shares it lies above
the line through the bounds of both, and below a share above the bound of that share. The memory limit only takes plans
away, so bounds of solves without it hold for every limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.layouts.placement import Mesh


class HiddenBounds:
    """What is proven of every mesh. plain: bounds in seconds of the sum that counts everything (share 0)."""

    def __init__(self, plain: Mapping[Mesh, float]) -> None:
        self._proven: dict[Mesh, dict[float, float]] = {mesh: {0.0: bound} for mesh, bound in plain.items()}

    def learn(self, mesh: Mesh, share: float, bound: float) -> None:
        """A solve on the mesh under a share has proven this bound, in seconds."""
        known = self._proven.setdefault(mesh, {})
        known[share] = max(bound, known.get(share, -math.inf))

    def at_least(self, mesh: Mesh, share: float) -> float:
        """Seconds below which no plan of the mesh costs under a share; minus infinity where nothing is known."""
        known = self._proven.get(mesh, {})
        above = [(other, bound) for other, bound in known.items() if other >= share]
        below = [(other, bound) for other, bound in known.items() if other < share]
        best = max((bound for _, bound in above), default=-math.inf)
        for high, bound in above:
            for low, start in below:
                best = max(best, start + (bound - start) * (share - low) / (high - low))
        return best
