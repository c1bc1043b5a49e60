"""Equal parts of a dim become a dim of their own, so that each part can be sharded alike.

    q, k, v = split(x, n, dim=2)             -->   y = view(x, [b, s, 3, n]); q = select(y, 2, 0); ...
    a = slice(x, 1, 0, 4); b = slice(x, 1, 4, 8)   -->   the same, when the slices cover the dim
    cat([dq, dk, dv], dim=2)                 -->   view(cat([view(dq, [b, s, 1, n]), ...], 2), [b, s, 3 * n])

A fused q|k|v projection can then be split by heads: the axis takes the factor n and leaves the factor 3 whole.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from autopar.passes.arguments import argument, arguments
from autopar.passes.tidy.insert import insert_before

aten = torch.ops.aten


def equal_splits_to_views(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Rewrite equal splits, families of equal slices that cover a dim, and concatenations of equal parts."""
    slices: dict[tuple[Node, int], list[Node]] = defaultdict(list)
    for node in list(graph_module.graph.nodes):
        if node.target in (aten.split.Tensor, aten.split_with_sizes.default):
            _rewrite_split(node)
        elif node.target is aten.slice.Tensor and argument(node, 4, "step", 1) == 1:
            slices[arguments(node)[0], _dim(node)].append(node)
        elif node.target is aten.cat.default:
            _rewrite_cat(node)
    for (_, dim), family in slices.items():
        _rewrite_slices(arguments(family[0])[0], dim, family)  # the source itself may have been rewritten
    return graph_module


def _rewrite_split(node: Node) -> None:
    parts, source, dim = node.meta["val"], arguments(node)[0], _dim(node)
    getters = list(node.users)
    if len(parts) < 2 or not _all_equal(part.shape for part in parts):
        return
    if any(user.target is not operator.getitem for user in getters):
        return
    folded = _fold_dim(source, dim, len(parts), before=node, like=node)
    for getter in getters:
        _replace(getter, insert_before(getter, aten.select.int, (folded, dim, arguments(getter)[1]), like=node))
    node.graph.erase_node(node)


def _rewrite_slices(source: Node, dim: int, family: list[Node]) -> None:
    size, length = source.meta["val"].shape[dim], family[0].meta["val"].shape[dim]
    if length == 0 or length == size or size % length or not _all_equal(n.meta["val"].shape for n in family):
        return
    starts = [_start(node, size) for node in family]
    if set(starts) != set(range(0, size, length)):
        return
    folded = _fold_dim(source, dim, size // length, before=family[0], like=family[0])
    for node, start in zip(family, starts, strict=True):
        part = insert_before(node, aten.select.int, (folded, dim, start // length), like=node)
        _replace(node, part)


def _rewrite_cat(node: Node) -> None:
    parts = arguments(node)[0]
    if len(parts) < 2 or not _all_equal(part.meta["val"].shape for part in parts):
        return
    rank = parts[0].meta["val"].dim()
    dim = (arguments(node)[1] if len(arguments(node)) > 1 else 0) % rank
    shape = list(parts[0].meta["val"].shape)
    if shape[dim] == 1:
        return  # stacked already
    unfolded = [*shape[:dim], 1, *shape[dim:]]
    views = [insert_before(node, aten.reshape.default, (part, unfolded), like=node) for part in parts]
    for view in views:
        view.target = aten.view.default  # a dim of size 1 is always a view
    stacked = insert_before(node, aten.cat.default, (views, dim), like=node)
    result = insert_before(node, aten.view.default, (stacked, list(node.meta["val"].shape)), like=node)
    _replace(node, result)


def _fold_dim(source: Node, dim: int, parts: int, *, before: Node, like: Node) -> Node:
    shape = list(source.meta["val"].shape)
    folded = [*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]]
    return insert_before(before, aten.view.default, (source, folded), like=like)


def _replace(node: Node, replacement: Node) -> None:
    replacement.meta = {**node.meta, "val": replacement.meta["val"]}
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def _dim(node: Node) -> int:
    rank: int = arguments(node)[0].meta["val"].dim()
    dim: int = argument(node, 1 if node.target is aten.slice.Tensor else 2, "dim", 0)
    return dim % rank


def _start(node: Node, size: int) -> int:
    start: int = argument(node, 2, "start", None) or 0
    return start + size if start < 0 else start


def _all_equal(shapes: Iterable[torch.Size]) -> bool:
    return len(set(shapes)) == 1
