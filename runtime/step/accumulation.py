"""Accumulation: gradients that wait for their reduction while `no_sync()` is open.

The backward graph is cut where a gradient's last sums over ranks start (`passes/stages/late_sums.py`). Inside
`no_sync()` only the part before runs and its results are added up; the next backward outside adds its own and reduces
once. Gradients that are not cut are reduced every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.runtime.kernels import GraphCall


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBackward:
    """A backward graph cut before the last reductions. gradients: names of all that it returns; positions: among them,
    those that were cut."""

    unreduced: GraphCall
    reduce: GraphCall
    gradients: tuple[str, ...]
    positions: tuple[int, ...]


@dataclass(slots=True)
class HeldGradients:
    """Unreduced sums of one module, with the cut graph that they came from; `holding` is true inside no_sync()."""

    holding: bool = False
    cut: CutBackward | None = None
    sums: list[torch.Tensor] = field(default_factory=list)

    def backward(self, cut: CutBackward, inputs: list[Any]) -> list[torch.Tensor | None]:
        """Gradients of one backward: None for those that are held, complete ones with what was held before.

        inputs: arguments of the backward graph, emptied.
        """
        late = self._reduce_others(cut)
        gradients = list(cut.unreduced(inputs))
        fresh = [gradients[position] for position in cut.positions]
        self.sums = [a + b for a, b in zip(self.sums, fresh, strict=True)] if self.sums else fresh
        self.cut = cut
        reduced: Sequence[torch.Tensor | None] = [None] * len(fresh)
        if not self.holding:
            reduced = cut.reduce(self.sums)
            self.sums, self.cut = [], None
        for position, gradient in zip(cut.positions, reduced, strict=True):
            gradients[position] = gradient
        for name, gradient in late:
            position = cut.gradients.index(name)
            now = gradients[position]
            gradients[position] = gradient if now is None else now + gradient
        return gradients

    def _reduce_others(self, cut: CutBackward) -> list[tuple[str, torch.Tensor]]:
        """Reduce now what another graph (of another input shape) left, since its cuts may lie elsewhere."""
        return [] if self.cut is cut else self.release()

    def release(self) -> list[tuple[str, torch.Tensor]]:
        """Reduce now what is held: (name of the gradient, gradient)."""
        if self.cut is None:
            return []
        names = [self.cut.gradients[position] for position in self.cut.positions]
        late = list(zip(names, self.cut.reduce(self.sums), strict=True))
        self.sums, self.cut = [], None
        return late
