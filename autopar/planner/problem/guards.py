"""Guards: redistributions that a value may not take, whatever they cost.

    gathers    a weight under tensor parallelism, or a master before its cast: what is Shard on these axes stays so
    reduces    a sum of gradients on its way to a wide dtype: what is Partial stays so

Both compare whole sets of layouts at once: axis by axis, every source against every target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.placement import Layout, Partial, Placement, Shard

Flags = NDArray[np.bool_]
Targets = Sequence[Layout | None]  # None: not expressible behind a view; nothing reaches it anyway


def gathers(sources: Sequence[Layout], targets: Targets, axes: Sequence[int]) -> Flags:
    """(sources, targets): whether a tensor that is Shard on one of `axes` changes its placement there."""
    return _changes(sources, targets, axes, Shard)


def reduces(sources: Sequence[Layout], targets: Targets) -> Flags:
    """(sources, targets): whether a Partial placement changes."""
    return _changes(sources, targets, range(len(sources[0])), Partial)


def _changes(sources: Sequence[Layout], targets: Targets, axes: Sequence[int], kind: type) -> Flags:
    changed = np.zeros((len(sources), len(targets)), dtype=bool)
    for axis in axes:
        numbers: dict[Placement | None, int] = {}
        before = [numbers.setdefault(layout[axis], len(numbers)) for layout in sources]
        after = [numbers.setdefault(None if layout is None else layout[axis], len(numbers)) for layout in targets]
        concerned = np.array([isinstance(layout[axis], kind) for layout in sources])
        changed |= concerned[:, None] & (np.array(before)[:, None] != np.array(after)[None, :])
    return changed
