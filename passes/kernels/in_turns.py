"""Turns of the chunks of a layer of experts: the order in which the rows of one travel beside the products of another.

    send 0, up 0, down 0, return 0                 send 0, send 1
    send 1, up 1, down 1, return 1         -->     up 0, down 0, return 0        beside send 1
    gradient 0 of up, of down, ...                 gradients 0 of up and down    beside return 0
                                                   up 1, down 1, return 1, gradients 1 of up and down

First go the rows of all chunks; then, chunk by chunk, what the rows that return wait for, and what stays (gradients of
weights). Forward and backward each have their turns, from where the first of these calls stood.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Movements:
    """Of a chunk: exchanges of rows, and what computes where the experts are, in the order of the graph."""

    exchanges: tuple[fx.Node, ...]
    inside: tuple[fx.Node, ...]

    def of(self, phase: str) -> Movements:
        """Those of forward or of backward."""
        return Movements(*(tuple(n for n in nodes if n.meta["phase"] == phase) for nodes in self._both))

    @property
    def _both(self) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
        return self.exchanges, self.inside


def in_turns(graph: fx.Graph, layers: Sequence[Sequence[Movements]]) -> None:
    """Sort the calls of a graph in place; layers: the chunks of each."""
    order = _Order()
    waiting = {
        node: turn
        for chunks in layers
        for phase in ("forward", "backward")
        for turn in [[chunk.of(phase) for chunk in chunks]]
        for chunk in turn
        for node in (*chunk.exchanges, *chunk.inside)
    }
    if not waiting:
        return
    *nodes, output = graph.nodes
    for node in nodes:
        turn = () if node in order.placed else _turns(waiting.get(node, ()))
        for one in (*turn, node):
            order.place(one)
    for node in order.placed:
        output.prepend(node)


def _turns(chunks: Sequence[Movements]) -> Iterator[fx.Node]:
    """What is placed next, each behind what it reads."""
    behind = _readers(node for chunk in chunks for node in chunk.inside)
    for chunk in chunks:
        yield from (start for start in chunk.exchanges if start not in behind)
    for chunk in chunks:
        yield from (start for start in chunk.exchanges if start in behind)
        yield from chunk.inside


def _readers(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that reads what comes of them."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.users
    return found


class _Order:
    """placed: nodes, operands first."""

    def __init__(self) -> None:
        self.placed: dict[fx.Node, None] = {}

    def place(self, node: fx.Node) -> None:
        """Place a node behind those of its operands that are not placed yet."""
        stack = [node]
        while stack:
            missing = [operand for operand in stack[-1].all_input_nodes if operand not in self.placed]
            stack += reversed(missing)
            if not missing:
                self.placed[stack.pop()] = None
