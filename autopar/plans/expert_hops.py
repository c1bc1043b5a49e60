"""Hops: over which axes of a mesh rows of experts travel at once, one after the other.

    ep                  one: every row goes to the rank of its expert
    ep, ep_inner        two: over `ep` to the part of the group that has the expert, then over `ep_inner` inside of it

A token whose experts lie on several ranks of a part goes once to that part. Where the parts are nodes, this is what
crosses them.
"""

from __future__ import annotations

from collections.abc import Sequence

INNER_EXPERT_AXIS = "ep_inner"
"""Behind an axis `ep`."""


def hops_of(axes: Sequence[int], names: Sequence[str]) -> list[tuple[int, ...]]:
    """The axes of every hop of rows that travel over axes of these names."""
    cut = names.index(INNER_EXPERT_AXIS) if INNER_EXPERT_AXIS in names else 0
    return [tuple(axes[:cut]), tuple(axes[cut:])] if cut else [tuple(axes)]
