"""One spelling per view and cast, and none for those that change nothing.

    t(x), transpose(x, 0, 1)           -->   permute(x, [1, 0])
    reshape(x, [-1, 8]), _unsafe_view  -->   view(x, [4, 8])       (sizes written out)
    view(view(x, a), b)                -->   view(x, b)
    permute(permute(x, p), q)          -->   permute(x, p o q)
    copy(destination, source)          -->   expand(source, destination.shape)
    full_like(x, 2), zero(x)           -->   full(x.shape, 2), full(x.shape, 0)   (x is not read: its layout is free)
    x + 0, x * 1, view or expand to the shape it has, cast to the dtype it has, slice of everything   -->   x

`unsqueeze` and `squeeze` become views too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.passes.arguments import arguments

aten = torch.ops.aten


def one_spelling(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Rewrite the nodes in graph order, so that chains collapse in one sweep."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        respell = RESPELL.get(node.target)
        if respell is not None:
            respell(node)
        if _changes_nothing(node):
            node.replace_all_uses_with(arguments(node)[0])
            graph.erase_node(node)
    return _drop_unused_views(graph_module, graph)


def _drop_unused_views(graph_module: GraphModule, graph: Graph) -> GraphModule:
    for node in reversed(graph.nodes):
        if node.target in (aten.view.default, aten.permute.default) and not node.users:
            graph.erase_node(node)
    return graph_module


def _as_view(node: Node) -> None:
    source = arguments(node)[0]
    while source.target is aten.view.default:
        source = arguments(source)[0]
    node.target = aten.view.default
    node.args, node.kwargs = (source, list(node.meta["val"].shape)), {}


def _as_permute(node: Node) -> None:
    source, order = arguments(node)[0], _order(node)
    while source.target is aten.permute.default:
        inner = _order(source)
        source, order = arguments(source)[0], [inner[dim] for dim in order]
    node.target = aten.permute.default
    node.args, node.kwargs = (source, order), {}


def _order(node: Node) -> list[int]:
    rank = node.meta["val"].dim()
    if node.target is aten.permute.default:
        return [dim % rank for dim in arguments(node)[1]]
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    first, second = arguments(node)[1] % rank, arguments(node)[2] % rank
    order[first], order[second] = order[second], order[first]
    return order


def _as_expand(node: Node) -> None:
    """copy(destination, source) in a functional graph is the source, broadcast."""
    destination, source = arguments(node)[0].meta["val"], arguments(node)[1].meta["val"]
    if destination.dtype == source.dtype:
        node.target = aten.expand.default
        node.args, node.kwargs = (arguments(node)[1], list(destination.shape)), {}


def _as_plain_factory(node: Node) -> None:
    """Only dtype and device matter: no pinned memory, no strided layout written out."""
    node.kwargs = {key: value for key, value in node.kwargs.items() if key in ("dtype", "device")}


def _as_full(value: float | None) -> Callable[[Node], None]:
    """A factory of one value (None: its argument `fill_value`)."""

    def respell(node: Node) -> None:
        result = node.meta["val"]
        fill = arguments(node)[1 if node.target is aten.full_like.default else 2] if value is None else value
        if not isinstance(fill, Node):
            node.target = aten.full.default
            node.args = (list(result.shape), bool(fill) if result.dtype == torch.bool else fill)
            node.kwargs = {"dtype": result.dtype, "device": result.device}

    return respell


def _as_empty(node: Node) -> None:
    """A factory without values; strides mean nothing."""
    result = node.meta["val"]
    node.target = aten.empty.memory_format
    node.args, node.kwargs = (list(result.shape),), {"dtype": result.dtype, "device": result.device}


RESPELL: dict[Any, Callable[[Node], None]] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten._reshape_alias.default,
            aten.view_copy.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ),
        _as_view,
    ),
    **dict.fromkeys((aten.permute.default, aten.t.default, aten.transpose.int), _as_permute),
    **dict.fromkeys((aten.full.default, aten.scalar_tensor.default, aten.arange.start_step), _as_plain_factory),
    **dict.fromkeys((aten.zeros_like.default, aten.new_zeros.default, aten.zero.default), _as_full(0)),
    **dict.fromkeys((aten.ones_like.default, aten.new_ones.default), _as_full(1)),
    **dict.fromkeys((aten.full_like.default, aten.new_full.default), _as_full(None)),
    **dict.fromkeys(
        (
            aten.empty_like.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
            aten.empty_strided.default,
        ),
        _as_empty,
    ),
    aten.copy.default: _as_expand,
}
NEUTRAL: dict[Any, int] = {
    aten.add.Tensor: 0,
    aten.add.Scalar: 0,
    aten.sub.Tensor: 0,
    aten.mul.Tensor: 1,
    aten.mul.Scalar: 1,
    aten.div.Tensor: 1,
    aten.pow.Tensor_Scalar: 1,
}


def _changes_nothing(node: Node) -> bool:
    if node.target is aten.permute.default:
        return bool(arguments(node)[1] == sorted(arguments(node)[1]))
    if node.target in (aten.view.default, aten.expand.default, aten.slice.Tensor):
        return bool(arguments(node)[0].meta["val"].shape == node.meta["val"].shape)
    if node.target is aten._to_copy.default:
        source, result = arguments(node)[0].meta["val"], node.meta["val"]
        return bool(source.dtype == result.dtype and source.device == result.device)
    neutral = NEUTRAL.get(node.target)
    if neutral is not None and not node.kwargs and arguments(node)[1] == neutral:
        source, result = arguments(node)[0].meta["val"], node.meta["val"]
        return bool(source.dtype == result.dtype and source.shape == result.shape)
    return False
