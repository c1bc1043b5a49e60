"""Early starts, late waits: collectives run beside what does not need them.

    y = all_reduce(x); z = wait_tensor(y)          y = all_reduce(x)
    g = mm(a, b)                           -->     g = mm(a, b)
    return z, g                                    z = wait_tensor(y)
                                                   return z, g

A wait stands in front of the first reader that computes, waits of returned gradients at the end. A reduction or an
exchange starts behind the operator that makes its operand. A gather makes its tensor grow, so it starts where it is
read; but a gather of a parameter, which could start at once, starts behind the wait of the gather before it: one is
fetched ahead, and so is the next chunk of a product's rows (`chunk_products.py`). Reductions that hold their larger
operand while they run (reduce_scatter), or on which another one waits, are at most `IN_FLIGHT` at a time.

Every rank starts its collectives in the same order: positions follow from operators that all ranks have, never from
the layout work between them, which differs between uneven blocks. Hops of a ring stay where they stand in the program,
since ranks compute upon different numbers of blocks: out of order, keys would arrive for gradients. Then no waits can
lock, whatever order they have: of all collectives that some rank waits for and another has not started, the first in
that order has no rank left that could be held up in front of it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx
from torch.fx import GraphModule

from autopar._compat import Graph, LazyGraphModule
from autopar.graphs.collective_nodes import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_IN_PLACE,
    CHUNK_OF,
    HOP,
    REDUCE_SCATTER,
    WAIT,
    Collectives,
    describe,
    is_start,
)
from autopar.passes.overlap.bucket_collectives import in_buckets

IN_FLIGHT = 2
"""One is on the wire while the next is made."""


def early_starts(graph_module: GraphModule, bucket_bytes: Mapping[str, float]) -> GraphModule:
    """A copy of the graph with collectives in buckets, starts as early and waits as late as its data allow; the graph
    itself where it has no collectives."""
    graph, nodes = graph_module.graph, list(graph_module.graph.nodes)
    if not any(map(is_start, nodes)):
        return graph_module
    with in_buckets(graph, nodes, describe(nodes), bucket_bytes) as joined:
        sorted_graph = _in_order(_LateOrder(joined, describe(joined)).run(), nodes[-1])
    sorted_nodes = list(sorted_graph.nodes)
    order = early_order(sorted_nodes, describe(sorted_nodes))
    last = sorted_graph.output_node()
    for node in order:
        last.prepend(node)
    return LazyGraphModule(graph_module, sorted_graph)


def early_order(nodes: Sequence[fx.Node], found: Collectives) -> list[fx.Node]:
    """The order of `early_starts`, without the output; `nodes` as `in_buckets` gives them, found: `describe(nodes)`."""
    return _EarlyOrder(nodes, found).run()


def _in_order(order: list[fx.Node], output: fx.Node) -> fx.Graph:
    """A new graph of copies of the nodes in `order`, which returns what `output` returns."""
    graph = Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in order:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(fx.node.map_arg(output.args[0], copies.__getitem__))
    return graph


class _LateOrder:
    """An order of nodes in which waits, and the layout work behind them, come where they are needed.

    The nodes may be given in any order as long as everything that computes, and every start, stands behind what
    computes for it.
    """

    def __init__(self, nodes: Sequence[fx.Node], found: Collectives) -> None:
        self.nodes = [node for node in nodes if node.op != "output"]
        self.collectives = found
        self._placed: dict[fx.Node, None] = {}

    def run(self) -> list[fx.Node]:
        """All nodes, operands first."""
        for node in self.nodes:
            if node.op == "placeholder":
                self._need(node)
        self._begin()
        for node in self.nodes:
            if node not in self.collectives.late and not self._comes_by_itself(node):
                self._need(node)
        for node in (*self.collectives.starts, *self.nodes):
            self._need(node)
        return list(self._placed)

    def _begin(self) -> None:
        """Called behind the placeholders."""

    def _comes_by_itself(self, node: fx.Node) -> bool:
        """Whether something else than its position places a node: here, a sum of what another one must bring first."""
        return self._is_second(node)

    def _is_second(self, node: fx.Node) -> bool:
        return self.collectives.level.get(node, 0) > 0 and self.collectives.is_last_reduction(node)

    def _before(self, node: fx.Node) -> None:
        """Called in front of a node whose operands are placed."""

    def _behind(self, node: fx.Node) -> None:
        """Called behind a node that was placed."""

    def _need(self, node: fx.Node) -> None:
        """Place a node now, behind those of its operands that are not placed yet."""
        if node in self._placed:
            return
        stack = [node]
        while stack:
            current = stack[-1]
            missing = [operand for operand in current.all_input_nodes if operand not in self._placed]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if current not in self._placed:
                self._before(current)
            if current not in self._placed:
                self._placed[current] = None
                self._behind(current)


class _EarlyOrder(_LateOrder):
    """Starts come by themselves: behind what makes their operand, one gather ahead, or where they are read."""

    def __init__(self, nodes: Sequence[fx.Node], found: Collectives) -> None:
        super().__init__(nodes, found)
        gathers = [start for start in found.starts if found.is_early_gather(start)]
        self._first = gathers[:1]
        self._ahead = dict(itertools.pairwise(gathers)) | _next_chunks(found.starts)
        self._made_by: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._followers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._in_flight: list[fx.Node] = []
        place = {node: index for index, node in enumerate(self.nodes)}
        for start in found.starts:
            waits, makers = found.waits_into[start], found.makers[start]
            for wait in waits if self._is_second(start) else ():
                self._followers[wait].append(start)
            if start.target is not ALL_GATHER and makers and not waits and HOP not in start.meta:
                self._made_by[max(makers, key=place.__getitem__)].append(start)
        self._leads = {wait.all_input_nodes[0] for wait in self._followers}
        self._first += [start for start in found.starts if start not in self._leads and self._sums_what_is_given(start)]

    def _sums_what_is_given(self, start: fx.Node) -> bool:
        """Whether a start sums a gradient that other passes have added up, and holds nothing larger meanwhile."""
        found = self.collectives
        alone = not found.makers[start] and not found.waits_into[start]
        return alone and start.target in (ALL_REDUCE, ALL_REDUCE_IN_PLACE) and found.is_last_reduction(start)

    def _begin(self) -> None:
        for start in self._first:
            self._need(start)

    def _comes_by_itself(self, node: fx.Node) -> bool:
        return node in self.collectives.level and HOP not in node.meta

    def _before(self, node: fx.Node) -> None:
        bounded = node.target is REDUCE_SCATTER or node in self._leads
        if not bounded or not self.collectives.is_last_reduction(node):
            return
        while len(self._in_flight) >= IN_FLIGHT:
            self._wait_for(self._in_flight.pop(0))
        self._in_flight.append(node)

    def _wait_for(self, start: fx.Node) -> None:
        for user in start.users:
            if user.target is WAIT:
                self._need(user)

    def _behind(self, node: fx.Node) -> None:
        for start in self._made_by.get(node, ()):
            self._need(start)
        if node.target is not WAIT:
            return
        ahead = self._ahead.get(node.all_input_nodes[0])
        if ahead is not None:
            self._need(ahead)
        for start in self._followers.get(node, ()):
            if all(wait in self._placed for wait in self.collectives.waits_into[start]):
                self._need(start)


def _next_chunks(starts: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Of the gathers of one product's chunks: each -> the one behind it."""
    chunks: dict[str, list[fx.Node]] = defaultdict(list)
    for start in starts:
        if start.target is ALL_GATHER and CHUNK_OF in start.meta:
            chunks[start.meta[CHUNK_OF]].append(start)
    return {one: following for gathers in chunks.values() for one, following in itertools.pairwise(gathers)}
