"""Saved values: how backward gets what it reads of forward.

    y = exp(view(x))      backward reads y and the view      saved: x, y       made again: the view

Inputs are saved as themselves; views, factories and expansions are made again from what they look at; operators in
`recompute` are copied into backward; everything else is saved, once. A copied operator takes a gathered operand from
backward's own gather if there is one, else gathers again: what grew is never saved for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from autopar.graphs.node_values import VIEWS, is_backward
from autopar.passes.emitter import Copy


class SavedValues:
    """What backward takes of forward: `saved` values in order, `copied` nodes, and `replaced`: a copy in forward -> the
    same copy that backward makes by itself (the last nodes of both)."""

    def __init__(self, graph: fx.Graph, gradients: list[Any], recompute: frozenset[str]) -> None:
        self._recompute = recompute
        self._own_copies = {
            copy: node
            for node in graph.nodes
            if node.meta.get("phase") == "backward" and (copy := node.meta.get("redistributes")) is not None
        }
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.copied: set[fx.Node] = set()
        chosen = self._choose(list(_used_by_backward(graph, gradients)))
        self.saved = [node for node in graph.nodes if node in chosen]

    def _choose(self, wanted: list[fx.Node]) -> set[fx.Node]:
        """Values that backward itself wants come first: what they save, copied operators need not make again."""
        saved: set[fx.Node] = set()
        direct, indirect = wanted, list[fx.Node]()
        while direct or indirect:
            is_direct = bool(direct)
            node = direct.pop() if is_direct else indirect.pop()
            if node in saved or node in self.copied or node in self.replaced:
                continue
            own = None if is_direct else self._own_copy(node)
            if own is not None:
                self.replaced[node] = own
            elif self._is_made_again(node, is_direct):
                self.copied.add(node)
                recomputed = self._is_recomputed(node)
                (direct if is_direct and not recomputed else indirect).extend(node.all_input_nodes)
            else:
                saved.add(node)
        return saved

    def _own_copy(self, node: fx.Node) -> fx.Node | None:
        """The last node of backward's own copy, for the last node of the same copy in forward."""
        copy = node.meta.get("redistributes")
        is_last = copy is not None and all(user.meta.get("redistributes") != copy for user in node.users)
        return self._own_copies.get(copy) if is_last else None

    def _is_made_again(self, node: fx.Node, is_direct: bool) -> bool:
        if node.op == "placeholder":
            return False
        copy: Copy | None = node.meta.get("redistributes")
        if copy is not None:
            return (copy.grows and not is_direct) or self._is_recomputed(_source(node))
        if node.target in VIEWS or not node.all_input_nodes:
            return True
        return self._is_recomputed(node)

    def _is_recomputed(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.meta.get("operator") in self._recompute


def _source(node: fx.Node) -> fx.Node:
    """The node whose value a redistribution moves, seen through views."""
    while node.all_input_nodes and (node.meta.get("redistributes") is not None or node.target in VIEWS):
        node = node.all_input_nodes[0]
    return node


def _used_by_backward(graph: fx.Graph, gradients: list[Any]) -> Iterator[fx.Node]:
    """Nodes of forward that nodes of backward, or the gradients themselves, read."""
    seen = set()
    readers = [node.all_input_nodes for node in graph.nodes if is_backward(node) and node.op == "call_function"]
    for operands in (*readers, [node for node in gradients if isinstance(node, fx.Node)]):
        for node in operands:
            if not is_backward(node) and node not in seen:
                seen.add(node)
                yield node
