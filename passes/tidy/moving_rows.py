"""Gradients that move along a dim, written so that ranks which split it exchange little.

    flip(cumsum(flip(g, [d]), d), [d])                 -->   autopar::reverse_cumsum(g, d)     (of cumsum: carries)
    slice_scatter(full(shape, 0), g, d, start, end)    -->   constant_pad_nd(g, [..., start, size - end])  (of slice)

Of a slice only where a few rows are missing (`windows.are_a_few`).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import autopar.ops.prefix_sums  # noqa: F401 (registers autopar::reverse_cumsum)
from autopar.passes.arguments import argument, arguments
from autopar.passes.tidy.insert import insert_before
from autopar.rules.windows import are_a_few

aten = torch.ops.aten


def moving_rows(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Rewrite every flipped running sum of flipped floats, and every gradient of a slice of most of a dim."""
    for node in list(graph_module.graph.nodes):
        if node.target is aten.flip.default:
            _as_reverse_sum(node)
        elif node.target is aten.slice_scatter.default:
            _as_padding(node)
    return graph_module


def _as_reverse_sum(node: Node) -> None:
    sums = arguments(node)[0]
    if sums.target is not aten.cumsum.default or arguments(sums)[0].target is not aten.flip.default:
        return
    flipped = arguments(sums)[0]
    source, rank = arguments(flipped)[0], node.meta["val"].dim()
    dims = {tuple(at % rank for at in found) for found in (arguments(node)[1], arguments(flipped)[1])}
    dim = arguments(sums)[1] % rank
    if dims != {(dim,)} or source.meta["val"].dtype != node.meta["val"].dtype or not _is_float(source):
        return
    target = torch.ops.autopar.reverse_cumsum.default
    node.replace_all_uses_with(insert_before(node, target, (source, dim), like=node))


def _is_float(node: Node) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)


def _as_padding(node: Node) -> None:
    base, source, *_ = arguments(node)
    rank = node.meta["val"].dim()
    dim = argument(node, 2, "dim", 0) % rank
    size, length = node.meta["val"].shape[dim], source.meta["val"].shape[dim]
    window = slice(*(argument(node, at, name, None) for at, name in enumerate(("start", "end", "step"), start=3)))
    start, _, step = window.indices(size)
    zeros = base.target is aten.full.default and arguments(base)[1] == 0
    same = source.meta["val"].dtype == node.meta["val"].dtype
    if not zeros or step != 1 or not are_a_few(length - size, size) or not same:
        return
    pad = [0, 0] * (rank - 1 - dim) + [start, size - start - length]
    node.replace_all_uses_with(insert_before(node, aten.constant_pad_nd.default, (source, pad), like=node))
