"""Folded sums: rows added up in one tree, whatever computes them: the first half onto the second, until one is left.

    0 1 2 3    ->    0+2 1+3    ->    (0+2)+(1+3)

A fold of folds is a fold: rows on several ranks are folded over the ranks first, and then each rank's own.
"""

from __future__ import annotations

import torch


def folded_sum(rows: torch.Tensor) -> torch.Tensor:
    """(rows, ...) -> (...), in the dtype of the rows. Of an odd number of rows the last waits for the next level."""
    while (count := len(rows)) > 1:
        half = count // 2
        folded = rows[:half] + rows[half : 2 * half]
        rows = folded if count == 2 * half else torch.cat((folded, rows[-1:]))
    return rows[0]
