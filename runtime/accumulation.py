"""Accumulation: gradients that wait for their reduction while `no_sync()` is open.

The backward graph is cut where a gradient's last reduction starts:

    g = all_reduce(x, "sum"); return g     -->     unreduced(...) -> x        and        reduce(x) -> g

Inside `no_sync()` only `unreduced` runs and its results are added up; the next backward outside adds its own and runs
`reduce` once. Gradients that end in anything else than a sum over ranks are not cut and reduced every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.runtime.kernels import GraphCall

_REDUCTIONS = (
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBackward:
    """A backward graph cut before the last reductions; `positions` are the gradients that were cut."""

    unreduced: GraphCall
    reduce: GraphCall
    positions: tuple[int, ...]


@dataclass(slots=True)
class HeldGradients:
    """Unreduced sums of one module, with the cut graph that they came from; `holding` is true inside no_sync()."""

    holding: bool = False
    cut: CutBackward | None = None
    sums: list[torch.Tensor] = field(default_factory=list)

    def backward(self, cut: CutBackward, inputs: list[Any]) -> list[torch.Tensor | None]:
        """Gradients of one backward: None for those that are held, complete ones with what was held before.

        inputs: arguments of the backward graph, emptied.
        """
        late = self._reduce_others(cut)
        gradients = list(cut.unreduced(inputs))
        fresh = [gradients[position] for position in cut.positions]
        self.sums = [a + b for a, b in zip(self.sums, fresh, strict=True)] if self.sums else fresh
        self.cut = cut
        reduced: Sequence[torch.Tensor | None] = [None] * len(fresh)
        if not self.holding:
            reduced = cut.reduce(self.sums)
            self.sums, self.cut = [], None
        for position, gradient in zip(cut.positions, reduced, strict=True):
            gradients[position] = gradient
        for position, gradient in late:
            now = gradients[position]
            gradients[position] = gradient if now is None else now + gradient
        return gradients

    def _reduce_others(self, cut: CutBackward) -> list[tuple[int, torch.Tensor]]:
        """Reduce now what another graph (of another input shape) left, since its cuts may lie elsewhere."""
        return [] if self.cut is cut else self.release()

    def release(self) -> list[tuple[int, torch.Tensor]]:
        """Reduce now what is held: (position among the gradients, gradient)."""
        if self.cut is None:
            return []
        late = list(zip(self.cut.positions, self.cut.reduce(self.sums), strict=True))
        self.sums, self.cut = [], None
        return late


def cut_backward(graph_module: fx.GraphModule, compiled: Callable[[fx.GraphModule], GraphCall]) -> CutBackward | None:
    """Cut a bound backward graph before the last reduction of each gradient; None where no gradient has one."""
    gradients = _returned(graph_module.graph)
    chains = {position: chain for position, node in enumerate(gradients) if (chain := _reducing_chain(node))}
    if not chains:
        return None
    return CutBackward(
        unreduced=compiled(_without_reductions(graph_module, chains)),
        reduce=compiled(_only_reductions(graph_module, chains)),
        positions=tuple(chains),
    )


def _returned(graph: fx.Graph) -> list[Any]:
    return list(next(node for node in reversed(graph.nodes) if node.op == "output").args[0])


def _reducing_chain(gradient: Any) -> list[fx.Node]:
    """The nodes from a sum over ranks to the returned gradient, each the only reader of the one before; else []."""
    chain: list[fx.Node] = []
    node = gradient
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        chain.append(node)
        if node.target in _REDUCTIONS:
            return chain[::-1] if node.args[1] == "sum" else []
        if len(node.all_input_nodes) != 1:
            return []
        node = node.all_input_nodes[0]
    return []


def _without_reductions(graph_module: fx.GraphModule, chains: dict[int, list[fx.Node]]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    gradients = graph.graph_copy(graph_module.graph, copies)
    assert isinstance(gradients, tuple | list)
    results = list(gradients)
    for position, chain in chains.items():
        results[position] = copies[chain[0].all_input_nodes[0]]
    graph.output(tuple(results))
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return fx.GraphModule(graph_module, graph)


def _only_reductions(graph_module: fx.GraphModule, chains: dict[int, list[fx.Node]]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for position, chain in chains.items():
        copies[chain[0].all_input_nodes[0]] = graph.placeholder(f"unreduced_{position}")
    # collectives start on every rank in the order of the backward graph, not of the gradients
    place = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    for node in sorted((node for chain in chains.values() for node in chain), key=place.__getitem__):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[chain[-1]] for chain in chains.values()))
    return fx.GraphModule(graph_module, graph)
