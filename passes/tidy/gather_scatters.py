"""Gradients of slices that cover a dim are put together once, instead of scattered into zeros and added.

z = full([4, 6], 0)
g = add(add(x, slice_scatter(z, a, 1, 0, 3)), slice_scatter(z, b, 1, 3, 6))   -->   g = add(x, cat([a, b], 1))
g = add(select_scatter(z, a, 0, 0), select_scatter(z, b, 0, 1))               -->   g = cat([a[None], b[None]])
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from autopar.passes.arguments import argument, arguments
from autopar.passes.tidy.insert import insert_before

aten = torch.ops.aten
BOUNDS = ("start", "end", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """`source` scattered into zeros at [start, stop) of `dim` by `node`."""

    node: Node
    source: Node
    dim: int
    start: int
    stop: int


def gather_scatters(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Rewrite every sum whose terms include scatters that cover a dim exactly once."""
    for node in list(graph_module.graph.nodes):
        if _is_sum(node) and not _feeds_one_sum(node):
            terms = _terms(node)
            if len(terms) > 1:
                _rewrite_sum(node, terms)
    return graph_module


def _is_sum(node: Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    return all(isinstance(a, Node) and a.meta["val"].shape == node.meta["val"].shape for a in arguments(node))


def _feeds_one_sum(node: Node) -> bool:
    return len(node.users) == 1 and _is_sum(next(iter(node.users)))


def _terms(root: Node) -> list[Node]:
    """The leaves of a tree of sums, left to right."""
    terms: list[Node] = []
    pending = [root]
    while pending:
        node = pending.pop()
        if node is root or (_is_sum(node) and len(node.users) == 1):
            pending.extend(reversed(node.all_input_nodes if len(node.all_input_nodes) == 2 else list(arguments(node))))
        else:
            terms.append(node)
    return terms


def _rewrite_sum(root: Node, terms: list[Node]) -> None:
    families: dict[int, list[_Piece]] = defaultdict(list)
    for term in terms:
        piece = _piece(term)
        if piece is not None:
            families[piece.dim].append(piece)
    shape = root.meta["val"].shape
    for dim, pieces in families.items():
        pieces.sort(key=lambda piece: piece.start)
        if _covers(pieces, shape[dim]):
            _replace_terms(root, terms, pieces, dim)
            return


def _replace_terms(root: Node, terms: list[Node], pieces: list[_Piece], dim: int) -> None:
    sources = [_as_slice(root, piece) for piece in pieces]
    total = insert_before(root, aten.cat.default, (sources, dim), like=pieces[0].node)
    scattered = {piece.node for piece in pieces}
    for term in [term for term in terms if term not in scattered]:
        total = insert_before(root, aten.add.Tensor, (term, total), like=root)
    root.replace_all_uses_with(total)


def _as_slice(root: Node, piece: _Piece) -> Node:
    if piece.node.target is aten.slice_scatter.default:
        return piece.source
    return insert_before(root, aten.unsqueeze.default, (piece.source, piece.dim), like=piece.node)


def _covers(pieces: list[_Piece], size: int) -> bool:
    edges = [0, *(piece.stop for piece in pieces)]
    return [piece.start for piece in pieces] == edges[:-1] and edges[-1] == size and len(pieces) > 1


def _piece(node: Node) -> _Piece | None:
    if node.target not in (aten.slice_scatter.default, aten.select_scatter.default) or not _is_zeros(
        arguments(node)[0]
    ):
        return None
    _, source, dim, *_ = arguments(node)
    dim %= node.meta["val"].dim()
    size = node.meta["val"].shape[dim]
    if node.target is aten.select_scatter.default:
        start: int = argument(node, 3, "index", 0) % size
        return _Piece(node=node, source=source, dim=dim, start=start, stop=start + 1)
    window = slice(*(argument(node, position, name, None) for position, name in enumerate(BOUNDS, start=3)))
    first, last, step = window.indices(size)
    return _Piece(node=node, source=source, dim=dim, start=first, stop=last) if step == 1 else None


def _is_zeros(node: object) -> bool:
    return isinstance(node, Node) and node.target is aten.full.default and arguments(node)[1] == 0
