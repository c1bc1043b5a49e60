"""A gradient fold: the gradients of micro-batches, added up in one tree (`plans/logical_shards.py`) as they come.

    fold.add(g0); fold.add(g2); fold.add(g1); fold.add(g3)       g0+g2 is kept until g1+g3 is there
    fold.total()                                                 (g0+g2)+(g1+g3)

Like the digits of a binary counter: a sum of 2^k gradients is kept until there is another one of as many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GradientFold:
    """Of one stage and step. Gradients are told by their place among those of the stage."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, dict[int, torch.Tensor]]] = []
        """(how many gradients are in it, sums) with fewer and fewer gradients."""

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Of the next micro-batch, in the order of `folding_order`. None: of what is frozen."""
        count, sums = 1, {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
        while self._kept and self._kept[-1][0] == count:
            _, before = self._kept.pop()
            for place in sums:
                sums[place] = before.pop(place) + sums[place]
            count *= 2
        self._kept.append((count, sums))

    def total(self) -> dict[int, torch.Tensor]:
        """The sums of all, in memory of their own."""
        (count, sums), *more = self._kept
        assert not more, "the number of micro-batches is a power of two"
        return sums if count > 1 else {place: gradient.clone() for place, gradient in sums.items()}
