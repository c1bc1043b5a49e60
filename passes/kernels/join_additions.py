"""Additions join the norm beside them, and padded copies around collectives become one kernel, in a lowered graph.

    h = add(a, b); n, rstd = rms_norm(h, w, eps)           -->   n, h, rstd = autopar::add_rms_norm(a, b, w, eps)
    dx, dw = rms_norm_backward(..., None); d = add(dx, e)  -->   d, dw = autopar::rms_norm_backward(..., e)

Only norms of ours (`use_kernels`) take an addition, where `kernel_groups` says so: the price holds it. It has to wait
for the local graph: between the two there may be a collective, and a stage may end. All ranks replace the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopar.graphs.kernel_groups import added_gradient, added_rows, kernel_groups
from autopar.ops import norms, packing  # noqa: F401 (they are registered)
from autopar.ops.blocks import pieces_first, pieces_joined
from autopar.passes.kernels.graph_patterns import shape_of
from autopar.passes.kernels.graph_writer import GraphWriter

ours = torch.ops.autopar
Recomputed = Collection[str]


def join_additions(graph: fx.Graph, backend: str, recomputed: Recomputed) -> None:
    """Join in place what is one kernel under a backend. recomputed: names of the operators that backward makes again;
    an addition joins the norm behind it only where both are, or neither is."""
    write, groups = GraphWriter(graph), kernel_groups(graph, backend)
    for node in list(graph.nodes):
        if node.target not in NORMS:
            continue
        rows, gradient = added_rows(node), added_gradient(node)
        if rows is not None and groups[rows] == groups[node]:
            _forward(write, node, rows, recomputed)
        elif gradient is not None and groups[gradient] == groups[node]:
            _backward(write, node, gradient)
    write.erase_unread()


def pack_copies(graph: fx.Graph) -> None:
    """One kernel for each padded copy in front of a collective or behind it, for which torch takes two; in place."""
    write = GraphWriter(graph)
    for node in list(graph.nodes):
        if node.target is pieces_first:
            _pack(write, node)
        elif node.target is pieces_joined:
            _unpack(write, node)
    write.erase_unread()


def _forward(write: GraphWriter, node: fx.Node, addition: fx.Node, recomputed: Recomputed) -> None:
    if (addition.meta["operator"] in recomputed) != (node.meta["operator"] in recomputed):
        return
    out, *statistics = (_item(node, index) for index in range(len(node.meta["dtype"])))
    write.replace(NORMS[node.target], (*addition.args, *node.args[1:]), (out, addition, *statistics), like=node)


def _backward(write: GraphWriter, node: fx.Node, addition: fx.Node) -> None:
    row, *vectors = (_item(node, index) for index in range(len(node.meta["dtype"])))
    other = next(one for one in addition.args if one is not row)
    write.replace(NORMS[node.target], (*node.args[:-1], other), (addition, *vectors), like=node)


def _item(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == index), None)


def _pack(write: GraphWriter, node: fx.Node) -> None:
    x: Any
    cuts: Any
    padded: Any
    x, cuts, padded = node.args
    if _is_one_copy(shape_of(x), cuts, padded):
        write.replace(ours.pack.default, (x, *cuts[0], padded[cuts[0][0]]), (node,))


def _unpack(write: GraphWriter, node: fx.Node) -> None:
    cuts: Any
    padded: Any
    shape: Any
    y, cuts, padded, shape = node.args
    if _is_one_copy(tuple(shape), cuts, padded):
        dim = cuts[0][0]
        write.replace(ours.unpack.default, (y, *cuts[0], padded[dim], shape[dim]), (node,))


def _is_one_copy(shape: tuple[int, ...], cuts: Any, padded: Any) -> bool:
    """Whether there is a single cut, and its dim is padded and nothing else."""
    if len(cuts) != 1 or tuple(padded) == shape:
        return False
    return all(dim == cuts[0][0] or size == whole for dim, (size, whole) in enumerate(zip(shape, padded, strict=True)))


NORMS: Mapping[Any, Callable[..., Any]] = {
    ours.rms_norm.default: ours.add_rms_norm.default,
    ours.layer_norm.default: ours.add_layer_norm.default,
    ours.rms_norm_backward.default: ours.rms_norm_backward.default,
    ours.layer_norm_backward.default: ours.layer_norm_backward.default,
}
"""Operator -> the one that takes the addition beside it, too."""
