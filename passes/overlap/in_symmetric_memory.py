"""Products with their collective in symmetric memory: one call of torch in the place of both.

    x = wait_tensor(all_gather(b))                y, z, x = gathered_products(b, [w, v], lead, dim, True, "tp")
    y = mm(x, w); z = mm(x, v)          -->       t = tanh(x)
    t = tanh(x)

    y = mm(a, w)                                  z = product_scattered(a, w, lead, dim, "sum", "tp")
    z = wait_tensor(reduce_scatter(y))  -->

Inside, every rank copies the blocks of the others while it computes (`ops/symmetric_products.py`). What stands between
the two must leave rows whole: views, and the reordering that a collective along another dim than the first needs, which
the call does itself. Padded blocks stay as they are, and products whose weights are too late: the call stands in front
of the first reader of anything that it makes. So does what is gathered or scattered along columns: torch copies that
by kernels, which take multiprocessors from the product.

Which kinds over which groups is the plan's choice (`Plan.symmetric_memory`), by playing the step
(`planner/one_mesh/bucket_sizes.py`). Ranks of one group see equal shapes there, so they choose alike. A gathered
product computes each row as before, in smaller products; a scattered one adds up its ranks in their order, in the
precision of `sum`, where a ring rounds at every rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from autopar._compat import LazyGraphModule
from autopar.graphs.collective_nodes import ALL_GATHER, REDUCE_SCATTER, Collectives, describe, group_of, waits_of
from autopar.graphs.forward_backward import Partition
from autopar.graphs.graph_copies import copied
from autopar.ops.blocks import Cut, padded, pieces_first, pieces_joined, region
from autopar.ops.symmetric_products import gathered_products, product_scattered
from autopar.passes.overlap.bucket_collectives import KINDS

_aten = torch.ops.aten
_MM = _aten.mm.default
_SAME_ROWS = frozenset({_aten.reshape.default, _aten.view.default, _aten.contiguous.default})
_WEIGHT_FORMS = frozenset({*_SAME_ROWS, _aten.permute.default, _aten._to_copy.default, region})
_REDUCTIONS = ("sum", "avg")
Groups = Mapping[str, Sequence[str]]
"""Kind of collective -> the groups over which it runs in symmetric memory, as `Plan.symmetric_memory`."""
Rows = tuple[tuple[int, ...], int]
"""Sizes through which rows count row-major, and which of them the ranks cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricProduct:
    """What one call does. value: the gathered rows, laid out, or the block that a scatter leaves; products: in program
    order; views: of the gathered rows; keeps: something else reads them; before: the first reader of what is made."""

    start: fx.Node
    value: fx.Node
    products: tuple[fx.Node, ...]
    rows: Rows
    before: fx.Node
    views: tuple[fx.Node, ...] = ()
    keeps: bool = False

    @property
    def kind(self) -> str:
        """Of the collective, as the plan names it."""
        return KINDS[self.start.target]

    @property
    def group(self) -> str:
        """Axes of the mesh, joined by "+"."""
        return str(group_of(self.start))


def both_in_symmetric_memory(partition: Partition, groups: Groups) -> Partition:
    """As `multiply_in_symmetric_memory`, of both graphs of a rank."""
    backward = partition.backward
    return replace(
        partition,
        forward=multiply_in_symmetric_memory(partition.forward, groups),
        backward=None if backward is None else multiply_in_symmetric_memory(backward, groups),
    )


def multiply_in_symmetric_memory(graph_module: GraphModule, groups: Groups) -> GraphModule:
    """A copy in which products run with the collectives of `groups` in symmetric memory."""
    return LazyGraphModule(graph_module, in_symmetric_memory(graph_module.graph, groups))


def in_symmetric_memory(source: fx.Graph, groups: Groups) -> fx.Graph:
    """As `multiply_in_symmetric_memory`, of a graph alone."""
    graph = copied(source)
    for start in _candidates(describe(list(graph.nodes))):
        if group_of(start) in groups.get(KINDS[start.target], ()):
            found = _found(start)
            if found is not None:
                (_write_gathered if start.target is ALL_GATHER else _write_scattered)(graph, found)
    return graph


def symmetric_products(collectives: Collectives) -> list[SymmetricProduct]:
    """What could run so, in the order of the collectives of a graph; a product between two of them is named with both.
    """
    return [found for start in _candidates(collectives) if (found := _found(start)) is not None]


def _candidates(collectives: Collectives) -> list[fx.Node]:
    """Gathers and scatters of activations; those of parameters and of their gradients travel in buckets."""
    return [
        start
        for start in collectives.starts
        if (start.target is ALL_GATHER and not collectives.is_early_gather(start))
        or (start.target is REDUCE_SCATTER and not collectives.is_last_reduction(start))
    ]


def _found(start: fx.Node) -> SymmetricProduct | None:
    waits = waits_of(start)
    if len(start.users) != 1 or not waits:
        return None
    return _gathered(start, waits[0]) if start.target is ALL_GATHER else _scattered(start, waits[0])


def _gathered(start: fx.Node, wait: fx.Node) -> SymmetricProduct | None:
    """Products of gathered rows, of which each needs its weight in front of the first reader of what they make."""
    sent, value = start.all_input_nodes[0], wait
    rows: Rows | None = ((math.prod(_shape(sent)[:-1]),), 0) if len(_shape(sent)) > 1 else None
    (joined, *others) = wait.users
    if joined.target is pieces_joined and not others:
        value = joined
        rows = _rows_of_rank(joined)
    if rows is None:
        return None
    products, views, others = _readers(value)
    before = min([*others, *(user for product in products for user in product.users)], default=None)
    taken = [one for one in products if _is_ready(one.args[1], before) and _dtype(one.args[1]) == _dtype(sent)]
    if before is None or not taken:
        return None
    keeps = bool(others) or len(taken) < len(products)
    return SymmetricProduct(
        start=start, value=value, products=tuple(taken), rows=rows, before=before, views=tuple(views), keeps=keeps
    )


def _readers(value: fx.Node) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """(products of the rows of a value, views of them, whatever else reads it), in program order."""
    products: list[fx.Node] = []
    views: list[fx.Node] = []
    others: list[fx.Node] = []
    for user in sorted(value.users):
        if user.target is _MM and user.args[0] is value and user.args[1] is not value:
            products.append(user)
        elif user.target in _SAME_ROWS and _has_same_rows(user, value):
            behind = _readers(user)
            views.append(user)
            for mine, found in zip((products, views, others), behind, strict=True):
                mine += found
        else:
            others.append(user)
    return sorted(products), sorted(views), others


def _is_ready(weight: Any, before: fx.Node | None) -> bool:
    """Whether a weight is there in front of a node, or is a view or a cast of what is, and so can be made there."""
    while weight.target in _WEIGHT_FORMS:
        weight = weight.all_input_nodes[0]
    return before is not None and weight < before


def _scattered(start: fx.Node, wait: fx.Node) -> SymmetricProduct | None:
    """A product that nothing but the scatter reads."""
    rows: Rows | None = None
    node = start.all_input_nodes[0]
    while node.target is not _MM:
        source = next(iter(node.all_input_nodes), None)
        if source is None or len(node.users) != 1 or not _is_described(source):
            return None
        if node.target is pieces_first and rows is None:
            arguments: Any = node.args
            rows = _rows(arguments[1], arguments[2], _shape(source))
            if rows is None:
                return None
        elif not _keeps_rows(node, source):
            return None
        node = source
    if len(node.users) != 1 or start.args[1] not in _REDUCTIONS:
        return None
    rows = rows or (_shape(node)[:1], 0)
    return SymmetricProduct(start=start, value=wait, products=(node,), rows=rows, before=start)


def _keeps_rows(node: fx.Node, source: fx.Node) -> bool:
    if node.target is padded:
        return _shape(node) == _shape(source)
    return node.target in _SAME_ROWS and _has_same_rows(node, source)


def _has_same_rows(node: fx.Node, source: fx.Node) -> bool:
    return _is_described(node) and _shape(node)[-1:] == _shape(source)[-1:]


def _is_described(node: fx.Node) -> bool:
    """Not so for operands that `local_call.py` makes contiguous for kernels that ask for it, which no product reads."""
    return "local_shape" in node.meta


def _rows(cuts: Sequence[Cut], padded_shape: Sequence[int], whole: tuple[int, ...]) -> Rows | None:
    """Of a value of which the ranks hold the middle factor of one cut, without padding."""
    dim, position, _ = cuts[0]
    if len(cuts) != 1 or dim == len(whole) - 1 or tuple(padded_shape) != whole:
        return None
    count = math.prod(whole[:-1])
    outer = math.prod(whole[:dim]) * position
    return ((outer, count // outer), 1) if outer > 1 else ((count,), 0)


def _rows_of_rank(joined: fx.Node) -> Rows | None:
    """Of the block of one rank."""
    cuts: Any
    padded_shape: Any
    _, cuts, padded_shape, _ = joined.args
    rows = _rows(cuts, padded_shape, _shape(joined))
    return rows and ((*rows[0][:-1], rows[0][-1] // cuts[0][2]), rows[1])


def _write_gathered(graph: fx.Graph, found: SymmetricProduct) -> None:
    start, value = found.start, found.value
    (sent,), width = start.all_input_nodes, _shape(value)[-1]
    whole = (math.prod(_shape(value)[:-1]), width)
    likes = [*found.products, *([value] if found.keeps else [])]
    shapes = [*map(_shape, found.products), *([whole] if found.keeps else [])]
    weights = [product.args[1] for product in found.products]
    for weight in weights:
        _make_ready(weight, found.before)
    with graph.inserting_before(found.before):
        operand = _reshaped(graph, sent, (math.prod(found.rows[0]), width), sent)
        arguments = (operand, weights, *found.rows, found.keeps, found.group)
        call = _called(graph, gathered_products, arguments, found.products[0], tuple(shapes), len(shapes))
        call.meta["group_axes"] = start.meta["group_axes"]
        for index, (like, shape) in enumerate(zip(likes, shapes, strict=True)):
            item = _called(graph, operator.getitem, (call, index), like, shape)
            like.replace_all_uses_with(_reshaped(graph, item, _shape(like), like))
    for product in found.products:
        graph.erase_node(product)
    for view in found.views:  # what is still read reads what the call keeps
        found.before.prepend(view)
    for view in reversed(found.views):
        if not view.users:
            graph.erase_node(view)
    _erase_from(graph, value)


def _make_ready(weight: Any, before: fx.Node) -> None:
    """Move a view or a cast of what is there in front of a node."""
    if weight.target in _WEIGHT_FORMS and not weight < before:
        _make_ready(weight.all_input_nodes[0], before)
        before.prepend(weight)


def _write_scattered(graph: fx.Graph, found: SymmetricProduct) -> None:
    (product,), start = found.products, found.start
    width = _shape(start)[-1]
    with graph.inserting_before(found.before):
        arguments = (*product.args, *found.rows, start.args[1], found.group)
        call = _called(graph, product_scattered, arguments, product, (math.prod(_shape(start)) // width, width))
        call.meta["group_axes"] = start.meta["group_axes"]
        found.value.replace_all_uses_with(_reshaped(graph, call, _shape(start), found.value))
    _erase_from(graph, found.value)


def _called(
    graph: fx.Graph, target: Any, arguments: tuple[Any, ...], like: fx.Node, shape: Any, several: int = 0
) -> fx.Node:
    node = graph.create_node("call_function", target, arguments)
    node.meta = {name: like.meta[name] for name in ("phase", "operator", "redistributes") if name in like.meta}
    node.meta |= {"local_shape": shape, "dtype": (_dtype(like),) * several if several else _dtype(like)}
    return node


def _reshaped(graph: fx.Graph, value: fx.Node, shape: tuple[int, ...], like: fx.Node) -> fx.Node:
    return value if _shape(value) == shape else _called(graph, _aten.reshape.default, (value, list(shape)), like, shape)


def _erase_from(graph: fx.Graph, last: fx.Node) -> None:
    """Erase a call that nobody reads any more, and what was made for it alone, up to the product or what was sent."""
    while not last.users and last.op == "call_function":
        source = last.all_input_nodes[0]
        graph.erase_node(last)
        if last.target in (ALL_GATHER, _MM):
            return
        last = source


def _dtype(node: Any) -> torch.dtype:
    return node.meta["dtype"]  # type: ignore[no-any-return]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["local_shape"])
