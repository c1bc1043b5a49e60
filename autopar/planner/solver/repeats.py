"""Repeated blocks: a short copy of a deep problem, whose messages start the deep one (*dual lifting*).

A model repeats its layer 126 times. `find_repeats` looks for a *shift*: a map from nodes to nodes that keeps costs,
matrices and wiring, as from each layer to the next. Following it gives every node its place in a row of copies:

    in - a0 - a1 - a2 - a3 - out          shift: a0 -> a1 -> a2 -> a3;  layers 0 .. 3;  `in` and `out` have none

`shorten` cuts the layers [start, start + removed) out and joins the ends: in - a0 - a3 - out. Sweeps on the short copy
are cheap; `Short.lift` then gives every edge of the deep problem the messages of its copy next to the cut. Any
messages are a valid bound, so nothing here can make an answer wrong: at worst the start is a poor one.

Nothing but content counts: equal arrays (tokens) and equal wiring, never names.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.solver.dual_ascent import Core, equal_surroundings
from autopar.planner.solver.labelling import Integers

KEPT_BEFORE, KEPT_AFTER = 3, 3
"""Layers of the short copy before and after the cut."""
FEWEST_REMOVED = 4
"""With fewer layers to leave out, a short copy does not pay."""
SEEDS = 6
"""How many pairs of equal nodes are tried as the beginning of a shift."""

End = tuple[int, bool, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """`shift[v]` is the copy of v in the next layer; `layer[v]` its layer, None outside; `num_layers` of them."""

    shift: dict[int, int]
    layer: list[int | None]
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """A short copy.

    `core`; `edges[e]`: its edge that stands for edge e of the deep core, or -1; `nodes[v]`: its node that stands for
    node v.
    """

    core: Core
    edges: Integers
    nodes: Integers


def find_repeats(core: Core) -> Repeats | None:
    """Return the shift that covers most nodes, or None when nothing repeats often enough."""
    classes = equal_surroundings(core)
    ends = _ends(core)
    members: dict[int, list[int]] = defaultdict(list)
    for node, kind in enumerate(classes):
        members[kind].append(node)
    best: Repeats | None = None
    for node, copy in _seeds(members):
        found = _follow(_grow(node, copy, classes, ends), ends)
        if best is None or len(found.shift) > len(best.shift):
            best = found
    return best


def shorten(core: Core) -> Short | None:
    """Return `core` with most of its equal layers cut out, or None when it has too few.

    Encoder and decoder repeat different layers: one kind after the other is cut, until none is left.
    """
    short = _cut_once(core)
    again = None if short is None else shorten(short.core)
    if short is None or again is None:
        return short
    return Short(core=again.core, edges=_composed(short.edges, again.edges), nodes=_composed(short.nodes, again.nodes))


def _cut_once(core: Core) -> Short | None:
    repeats = find_repeats(core)
    if repeats is None:
        return None
    removed = repeats.num_layers - KEPT_BEFORE - KEPT_AFTER
    if removed < FEWEST_REMOVED:
        return None
    short = _Cut(core, repeats, removed).short()
    return short if len(short.core.costs) < len(core.costs) else None


def _composed(first: Integers, second: Integers) -> Integers:
    """Follow two maps, where -1 stays -1."""
    return np.where(first >= 0, second[first], -1)


def _ends(core: Core) -> list[list[End]]:
    """Return for every node (matrix, whether it is the later end, the other node), sorted."""
    ends: list[list[End]] = [[] for _ in core.costs]
    for u, v, matrix in core.edges:
        ends[u].append((matrix, False, v))
        ends[v].append((matrix, True, u))
    return [sorted(row) for row in ends]


def _seeds(members: dict[int, list[int]]) -> list[tuple[int, int]]:
    """Return pairs of neighbouring copies, from the middle of classes that have the most common number of members."""
    counts = Counter(len(nodes) for nodes in members.values())
    enough = [size for size in counts if size > FEWEST_REMOVED]
    enough.sort(key=lambda size: (-size * counts[size], size))
    rows = [nodes for size in enough for nodes in members.values() if len(nodes) == size]
    step = max(1, len(rows) // SEEDS)
    return [(nodes[len(nodes) // 2 - 1], nodes[len(nodes) // 2]) for nodes in rows[::step][:SEEDS]]


def _grow(node: int, copy: int, classes: Sequence[int], ends: Sequence[Sequence[End]]) -> dict[int, int]:
    """Return the shift that maps `node` to `copy`, grown along edges of equal matrix, direction and class."""
    shift, taken, queue = {node: copy}, {copy}, deque([(node, copy)])
    while queue:
        node, copy = queue.popleft()
        there = defaultdict(list)
        for matrix, later, other in ends[copy]:
            there[matrix, later, classes[other]].append(other)
        here = defaultdict(list)
        for matrix, later, other in ends[node]:
            here[matrix, later, classes[other]].append(other)
        for key, others in here.items():
            for other, image in zip(others, there.get(key, ()), strict=False):
                if other != image and other not in shift and image not in taken:
                    shift[other] = image
                    taken.add(image)
                    queue.append((other, image))
    return shift


def _follow(shift: dict[int, int], ends: Sequence[Sequence[End]]) -> Repeats:
    """Number the layers: a copy is one layer on, and rows of copies are aligned where an edge first joins them."""
    images = set(shift.values())
    row_of: dict[int, tuple[int, int]] = {}
    rows: list[list[int]] = []
    for first in sorted(shift.keys() - images):
        row = [first]
        while row[-1] in shift:
            row.append(shift[row[-1]])
        row_of.update({node: (len(rows), place) for place, node in enumerate(row)})
        rows.append(row)
    layer: list[int | None] = [None] * len(ends)
    if not rows:
        return Repeats(shift={}, layer=layer, num_layers=0)
    offsets = _align(rows, row_of, ends)
    lowest = min(offsets.values())
    for number, offset in offsets.items():
        for place, node in enumerate(rows[number]):
            layer[node] = offset - lowest + place
    num_layers = 1 + max(place for place in layer if place is not None)
    return Repeats(shift=shift, layer=layer, num_layers=num_layers)


def _align(
    rows: Sequence[Sequence[int]], row_of: dict[int, tuple[int, int]], ends: Sequence[Sequence[End]]
) -> dict[int, int]:
    """Return the layer in which each row begins: nearest neighbours first, so that a layer is a stretch of schedule."""
    longest = max(range(len(rows)), key=lambda number: (len(rows[number]), -number))
    offsets: dict[int, int] = {}
    heap = [(0, longest, 0)]
    while heap:
        _, number, offset = heapq.heappop(heap)
        if number in offsets:
            continue
        offsets[number] = offset
        place = len(rows[number]) // 2
        node = rows[number][place]
        for _, _, other in ends[node]:
            beside, there = row_of.get(other, (-1, 0))
            if beside >= 0 and beside not in offsets:
                heapq.heappush(heap, (abs(other - node), beside, offset + place - there))
    return offsets


class _Cut:
    """The cut of one core: layers `start` up to `stop` are left out."""

    def __init__(self, core: Core, repeats: Repeats, removed: int) -> None:
        self.core, self.repeats = core, repeats
        self.start, self.stop, self.removed = KEPT_BEFORE, KEPT_BEFORE + removed, removed
        self.by_layer = self._copies()

    def short(self) -> Short:
        """Cut and rewire."""
        layer, core = self.repeats.layer, self.core
        kept = [node for node, place in enumerate(layer) if place is None or not self._is_out(place)]
        number = {node: index for index, node in enumerate(kept)}
        edges: dict[tuple[int, int], int] = {}
        for u, v, matrix in core.edges:
            ends = self._joined(u, v)
            if ends is not None and ends[0] < ends[1]:
                edges.setdefault((number[ends[0]], number[ends[1]]), matrix)
        ordered = sorted((u, v, matrix) for (u, v), matrix in edges.items())
        place_of = {edge: index for index, edge in enumerate(ordered)}
        stand_in = []
        for u, v, matrix in core.edges:
            a, b = self._beside_cut(u, v)
            stand_in.append(place_of.get((number.get(a, -1), number.get(b, -1), matrix), -1))
        nodes = [number.get(self._beside_cut(node, node)[0], -1) for node in range(len(core.costs))]
        short = Core(arena=core.arena, costs=tuple(core.costs[node] for node in kept), edges=tuple(ordered))
        return Short(core=short, edges=np.array(stand_in, dtype=np.int64), nodes=np.array(nodes, dtype=np.int64))

    def _copies(self) -> dict[int, dict[int, int]]:
        """Return for every layered node its copies by layer; equal rows share one dict."""
        shift, layer = self.repeats.shift, self.repeats.layer
        copies: dict[int, dict[int, int]] = {}
        for node, place in enumerate(layer):
            if place is None or node in copies:
                continue
            copies.setdefault(node, {})[place] = node
        backward = {image: node for node, image in shift.items()}
        for first in sorted(copies.keys() - {n for n in backward if layer[backward[n]] is not None}):
            row: dict[int, int] = {}
            copy: int | None = first
            while copy is not None and (level := layer[copy]) is not None:
                row[level] = copy
                copies[copy] = row
                copy = shift.get(copy)
        return copies

    def _is_out(self, place: int) -> bool:
        return self.start <= place < self.stop

    def _copy(self, node: int, layers: int) -> int:
        """Return the copy of `node` so many layers on, -1 where there is none; a node without layer is its own."""
        place = self.repeats.layer[node]
        return node if place is None else self.by_layer[node].get(place + layers, -1)

    def _joined(self, u: int, v: int) -> tuple[int, int] | None:
        """Return the ends of the short copy's edge that this edge becomes, None for one that is cut out."""
        places = [place for place in (self.repeats.layer[u], self.repeats.layer[v]) if place is not None]
        if not any(self._is_out(place) for place in places):
            crosses = len(places) == 2 and (places[0] < self.start) != (places[1] < self.start)
            return None if crosses else (u, v)
        if min(places) >= self.start or len(places) < 2:
            return None
        ends = tuple(
            self._copy(node, self.removed) if (self.repeats.layer[node] or 0) >= self.start else node for node in (u, v)
        )
        return None if -1 in ends else (ends[0], ends[1])

    def _beside_cut(self, u: int, v: int) -> tuple[int, int]:
        """Return the nodes whose edge stands for this one: itself outside the cut, else its copy just before."""
        places = [place for place in (self.repeats.layer[u], self.repeats.layer[v]) if place is not None]
        if not places or max(places) < self.start or min(places) >= self.stop:
            return u, v
        layers = self.start - 1 - min(places)
        ends = []
        for node in (u, v):
            copy = self._copy(node, layers)
            level = self.repeats.layer[copy] if copy >= 0 else None
            if level is not None and self._is_out(level):
                copy = self._copy(copy, self.removed)
            ends.append(copy)
        return ends[0], ends[1]
