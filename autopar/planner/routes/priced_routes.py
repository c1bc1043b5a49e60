"""Routes: the steps between two layouts, found once per class of pairs and priced by arrays.

    table of pairs -> numbers of routes (`route_table.py`) -> seconds of every route at some number of bytes

Most pairs take a general route, which is found once for all meshes of so many axes (`general_routes.py`), where the
dims have room for it (`fits.py`). The others, with uneven blocks or several spellings, ask `redistribution_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from autopar.layouts.moves import Way
from autopar.layouts.placement import Layout, Mesh, Partial, Placement, Shard
from autopar.layouts.redistribution import Shape, redistribution_steps, spare_dims
from autopar.planner.routes.fits import Fits, PairFits
from autopar.planner.routes.general_routes import NEXT_WAY, WAITING_IN_FIRST, general_routes
from autopar.planner.routes.pair_codes import MOST_AXES, PairEnds, encode
from autopar.planner.routes.route_table import NOWHERE, PricedStep, RouteTable, route_table

Booleans = NDArray[np.bool_]
Integers = NDArray[np.int64]

_UNKNOWN = -1


class Routes:
    """The routes of one mesh shape."""

    def __init__(self, mesh_shape: tuple[int, ...]) -> None:
        self.found: RouteTable = route_table(len(mesh_shape))
        self._mesh = Mesh(tuple(map(str, range(len(mesh_shape)))), mesh_shape)
        self._fits = Fits(mesh_shape)
        self._exact: dict[tuple[Shape, Layout, Layout], int] = {}

    def table(self, shape: Shape, sources: Sequence[Layout], targets: Sequence[Layout]) -> Integers:
        """(sources, targets) numbers of routes; NOWHERE where something would have to turn into a Partial."""
        routes = np.where(_are_reachable(sources, targets), _UNKNOWN, NOWHERE)
        if len(self._mesh.shape) <= MOST_AXES:
            self._take_general(routes, shape, sources, targets)
        for i, j in zip(*(places.tolist() for places in np.nonzero(routes == _UNKNOWN)), strict=True):
            pair = shape, sources[i], targets[j]
            route = self._exact.get(pair)
            if route is None:
                route = self._exact[pair] = self._find(*pair)
            routes[i, j] = route
        return routes

    def _take_general(
        self, routes: Integers, shape: Shape, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> None:
        """Fill in the general routes where the first legal way of a pair is one."""
        num_axes = len(self._mesh.shape)
        shards = sorted(
            {p for layout in (*sources, *targets) for p in layout if isinstance(p, Shard)},
            key=lambda shard: (shard.dim, shard.split, shard.zigzag),
        )
        ends = PairEnds(sources, shards, num_axes), PairEnds(targets, shards, num_axes)
        fits = PairFits(self._fits, shape, shards, ends)
        source, target = np.nonzero((routes == _UNKNOWN) & fits.are_plain())
        codes = encode(*ends, num_axes)[source, target]
        ways = _first_ways(spare_dims(shape, self._mesh.size), sources, targets)[source, target]
        general = general_routes(num_axes)
        while len(source):
            found, paths = general.entries(codes, ways)
            fit, broken = fits.verdicts(source, target, paths, general.cuts)
            routes[source[fit], target[fit]] = found[fit]
            again = broken & (ways != Way.OVER_COMMON)
            source, target, codes, ways = source[again], target[again], codes[again], NEXT_WAY[ways[again]]

    def _find(self, shape: Shape, source: Layout, target: Layout) -> int:
        """The route that the sizes of this mesh ask for."""
        steps = redistribution_steps(shape, source, target, self._mesh)
        changes = sum((a != b) << axis for axis, (a, b) in enumerate(zip(source, target, strict=True)))
        return self.found.number([PricedStep.of(step) for step in steps], changes)


def _are_reachable(sources: Sequence[Layout], targets: Sequence[Layout]) -> Booleans:
    """(sources, targets) `is_reachable`."""
    names: dict[Placement, int] = {}
    numbers = [
        np.array(
            [[names.setdefault(p, len(names) + 1) if isinstance(p, Partial) else 0 for p in row] for row in rows],
            np.int64,
        ).reshape(len(rows), -1)
        for rows in (sources, targets)
    ]
    reached = np.ones((len(sources), len(targets)), np.bool_)
    for before, after in zip(numbers[0].T, numbers[1].T, strict=True):
        reached &= (after[None, :] == 0) | (before[:, None] == after[None, :])
    return reached


def _first_ways(dims: Sequence[int], sources: Sequence[Layout], targets: Sequence[Layout]) -> Integers:
    """(sources, targets) the way to try first: waiting in the last of `dims` that neither layout cuts."""
    free = sum(1 << dim for dim in dims)
    cut = [np.array([_cut_dims(layout) for layout in layouts], np.int64) for layouts in (sources, targets)]
    spare = free & ~(cut[0][:, None] | cut[1][None, :])
    return np.where(spare > 1, Way.WAITING, np.where(spare == 1, WAITING_IN_FIRST, Way.STRAIGHT))


def _cut_dims(layout: Layout) -> int:
    """The dims that a layout cuts, as bits."""
    return sum(1 << dim for dim in {p.dim for p in layout if isinstance(p, Shard)})


@cache
def routes_of(mesh_shape: tuple[int, ...]) -> Routes:
    """The routes of a mesh shape, shared by all prices of one process."""
    return Routes(mesh_shape)
