"""Tables: what it costs to bring a tensor from the layout of its producer to the layout that a reader wants.

A table is asked from the prices once per tensor equivalence class and pair of label sets, then spread over the labels
of both ends:

    distinct (R, S0) x (R, S0) -> [[0, slice], [gather, 0]]      a reader with the layouts (R, S0, S0): 2 x 3 entries

What a view cannot express, and what the guards forbid, is FORBIDDEN.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import numpy as np

from autopar.layouts.placement import Layout, Mesh
from autopar.passes.view_layouts import layout_before_view
from autopar.planner.problem.axis_presets import weights_stay_split
from autopar.planner.problem.equivalence import TensorEquivalence
from autopar.planner.problem.guards import gathers, reduces
from autopar.planner.problem.prices import Floats, Prices
from autopar.planner.problem.skeleton import Skeleton
from autopar.planner.problem.strategies import LayoutSet
from autopar.planner.solver import FORBIDDEN

Targets: TypeAlias = tuple[Layout | None, ...]
Pair: TypeAlias = tuple[tuple[int, ...], int, int, int]
"""Shape and bytes of a tensor, numbers of the label sets of its producer and of its reader (in front of the views)."""


class Tables:
    """The redistribution tables of one program on one mesh."""

    def __init__(self, skeleton: Skeleton, mesh: Mesh, prices: Prices) -> None:
        self.skeleton, self.mesh, self.prices = skeleton, mesh, prices
        self._layout_sets: list[Targets] = []
        self._numbers: dict[Targets, int] = {}
        self._known: dict[int, tuple[int, Targets]] = {}  # by id: the number of a tuple, and the tuple
        self._before: dict[tuple[int, int], int] = {}
        self._priced: dict[Hashable, Floats] = {}
        self._allowed: dict[Hashable, Floats] = {}
        self._spread: dict[Hashable, Floats] = {}

    def table(
        self, tensor: int, source: LayoutSet, target: LayoutSet, views: int = 0, freed: tuple[int, ...] = ()
    ) -> Floats:
        """(labels of the source, labels of the target) seconds, behind a chain of views. freed: axes on which the
        user's constraints take the place of the guard of a weight."""
        before = self._number_before(views, target.distinct)
        equivalence = self.skeleton.tensors[tensor]
        axes = self._guarded_axes(equivalence, freed)
        pair = (equivalence.shape, equivalence.nbytes, self._number(source.distinct), before)
        key = (pair, axes, equivalence.keeps_sums, source.index.tobytes(), target.index.tobytes())
        if key not in self._spread:
            allowed = self._allowed_table(pair, axes, equivalence.keeps_sums, source.distinct)
            self._spread[key] = np.ascontiguousarray(allowed[np.ix_(source.index, target.index)])
        return self._spread[key]

    def before_views(self, views: int, layouts: tuple[Layout, ...]) -> Targets:
        """The layouts in front of a chain of views that give these layouts behind it; None where there is none."""
        return self._layout_sets[self._number_before(views, layouts)]

    def _number(self, layouts: Targets) -> int:
        """Number of a label set. Hashing hundreds of layouts is slow, so every tuple is hashed once and then kept."""
        known = self._known.get(id(layouts))
        if known is None:
            number = self._numbers.setdefault(layouts, len(self._layout_sets))
            if number == len(self._layout_sets):
                self._layout_sets.append(layouts)
            known = self._known[id(layouts)] = (number, layouts)
        return known[0]

    def _number_before(self, views: int, layouts: tuple[Layout, ...]) -> int:
        number = self._number(layouts)
        if not views:
            return number
        if (views, number) not in self._before:
            found: list[Layout | None] = list(layouts)
            for view in self.skeleton.views[views]:
                found = [None if layout is None else layout_before_view(view, layout, self.mesh) for layout in found]
            self._before[views, number] = self._number(tuple(found))
        return self._before[views, number]

    def _allowed_table(
        self, pair: Pair, axes: tuple[int, ...], keeps_sums: bool, sources: tuple[Layout, ...]
    ) -> Floats:
        """(distinct sources, distinct targets) seconds, FORBIDDEN where a guard stands."""
        key = (pair, axes, keeps_sums)
        if key not in self._allowed:
            shape, nbytes, _, target = pair
            targets = self._layout_sets[target]
            if pair not in self._priced:
                self._priced[pair] = self.prices.redistribution_table(shape, nbytes, sources, targets)
            forbidden = gathers(sources, targets, axes)
            if keeps_sums:
                forbidden |= reduces(sources, targets)
            priced = self._priced[pair]
            self._allowed[key] = np.where(forbidden, FORBIDDEN, priced) if forbidden.any() else priced
        return self._allowed[key]

    def _guarded_axes(self, equivalence: TensorEquivalence, freed: tuple[int, ...]) -> tuple[int, ...]:
        """Axes over which a value may not be gathered: any for a master, which is cast first; tp for a weight."""
        if equivalence.guard == "master":
            return tuple(range(len(self.mesh.shape)))
        return (
            tuple(a for a in weights_stay_split(self.mesh) if a not in freed) if equivalence.guard == "matrix" else ()
        )
