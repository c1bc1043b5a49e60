"""Products of experts whose rows are dealt out alike: sorted once, what lies between them in their order.

    ids, experts     of a product: the expert of every row, how many there are, where they are
    ExpertLayer      the rows of a rank by the experts that it has: all of them, or a block
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ops import experts
from autopar.ops.dispatch import Dispatch
from autopar.passes.kernels.graph_patterns import dtype_of, shape_of
from autopar.passes.kernels.ordered_rows import OrderedRows, viewed
from autopar.passes.kernels.row_wise import RowWise
from autopar.passes.kernels.token_copies import copied_tokens

_aten = torch.ops.aten
_ours = torch.ops.autopar
LINEAR = frozenset({_ours.expert_linear.default, experts.block_expert_linear, experts.dispatched_expert_linear})
OUTER = frozenset({_ours.expert_outer.default, experts.block_expert_outer, experts.dispatched_expert_outer})


def ids_of(product: fx.Node) -> fx.Node:
    """The expert of every row: (T,)."""
    ids = product.args[2]
    assert isinstance(ids, fx.Node)
    return ids


def experts_of(product: fx.Node) -> tuple[int, int]:
    """Number of experts of a product, and the first of them."""
    is_outer = product.target in OUTER
    count = product.args[3] if is_outer else shape_of(product.args[1])[0]
    first = 0 if there_of(product) else next(iter(product.args[5 if is_outer else 4 :]), 0)  # of a block
    assert isinstance(count, int)
    assert isinstance(first, int)
    return count, first


def there_of(product: fx.Node) -> Dispatch | None:
    """Where the experts are to which the rows of a product travel."""
    there = product.args[-1]
    return there if isinstance(there, Dispatch) else None


def behind_inputs(value: fx.Node) -> fx.Node:
    """The first node behind a value and behind all inputs."""
    behind = value.next
    while behind.op == "placeholder":
        behind = behind.next
    return behind


def reads_rows(product: fx.Node) -> RowWise:
    """A linear product reads and returns rows; of an outer product, they are summed over."""
    is_linear = product.target in LINEAR
    operands = product.args[: 1 if is_linear else 2]
    return RowWise(tuple(operand for operand in operands if isinstance(operand, fx.Node)), is_linear)


class ExpertLayer:
    """Products whose rows are dealt out alike. rows: what runs in their order, where that is known."""

    def __init__(
        self, graph: fx.Graph, products: list[fx.Node], every: list[fx.Node], rows: OrderedRows | None = None
    ) -> None:
        self._graph = graph
        self._ids = ids_of(products[0])
        self._experts = experts_of(products[0])
        reads = {one: reads_rows(one) for one in products}
        self._rows = self._ordered_rows(reads, every) if rows is None else rows
        self._gathered: dict[object, fx.Node] = {}
        self._tokens: dict[int, fx.Node] = {}

    def _ordered_rows(self, reads: dict[fx.Node, RowWise], every: list[fx.Node]) -> OrderedRows:
        """The products, and what runs in their order; every: products of all layers."""
        return OrderedRows(reads, self._ids, every, self._may_join)

    def _may_join(self, node: fx.Node, how: RowWise) -> bool:
        """Whether a call that treats rows alike may run on those of the products: a rank has its own rows only."""
        return True

    @property
    def rows(self) -> OrderedRows:
        """What runs in the order of the experts."""
        return self._rows

    def rewrite(self) -> None:
        """Put products and all between them in order, gather what they read, and put back what others read."""
        consumers = sorted(self._rows.inside)
        order, places, counts = self._order(next(one for one in consumers if one.target in LINEAR | OUTER))
        for node in consumers:
            for operand in self._rows.operands(node):
                if not self._rows.is_ordered(operand):
                    node.replace_input_with(operand, self._in_order(operand, order, node))
            if node.target in LINEAR:
                rows, weight, _, transposed, *_ = node.args
                node.target, node.args = _ours.sorted_expert_linear.default, (rows, weight, counts, transposed)
            elif node.target in OUTER:
                x, grad, _, _, transposed, *_ = node.args
                node.target, node.args = _ours.sorted_expert_outer.default, (x, grad, counts, transposed)
        for node in consumers:
            others = sorted(user for user in node.users if not self._rows.reads(user, node))
            if others and self._rows.is_ordered(node):
                self._put_back(node, places, others)

    def _order(self, first: fx.Node) -> list[fx.Node]:
        """What `expert_order` returns, behind the ids and all inputs."""
        rows, (count, start), behind = shape_of(self._ids), self._experts, self._behind()
        call = self._insert(behind, _ours.expert_order.default, (self._ids, count, start), first)
        call.meta.update(local_shape=(rows, rows, (count,)), dtype=(torch.int64,) * 3)
        items = [self._insert(call.next, operator.getitem, (call, item), first) for item in (2, 1, 0)]
        for item, shape in zip(items, ((count,), rows, rows), strict=True):
            item.meta.update(local_shape=shape, dtype=torch.int64)
        return items[::-1]

    def _behind(self) -> fx.Node:
        """Where the ids are known, behind all inputs."""
        return behind_inputs(self._ids)

    def _in_order(self, value: fx.Node, order: fx.Node, reader: fx.Node) -> fx.Node:
        """Rows of a value in order, gathered in front of the first that reads them."""
        key = (viewed(value), shape_of(value))
        if key not in self._gathered:
            source, index = self._tokens_of(value, order, reader) or (value, order)
            self._gathered[key] = self._arrived(source, index, reader)
        return self._gathered[key]

    def _arrived(self, source: fx.Node, index: fx.Node, reader: fx.Node) -> fx.Node:
        """Rows of `source` where products read them."""
        return self._select(source, index, reader, reader)

    def _tokens_of(self, value: fx.Node, order: fx.Node, reader: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """(tokens, the token of every row in order) of a value whose rows are k copies of each token."""
        found = copied_tokens(value)
        if found is None:
            return None
        (copied, each), shape = found, shape_of(value)
        if each not in self._tokens:
            self._tokens[each] = self._insert(
                order.next, _aten.div.Tensor_mode, (order, each), order, rounding_mode="floor"
            )
            self._tokens[each].meta.update(local_shape=shape_of(order), dtype=torch.int64)
        number = shape[0] // each
        flat = self._insert(reader, _aten.reshape.default, (copied, [number, *shape[1:]]), reader)
        flat.meta.update(local_shape=(number, *shape[1:]), dtype=dtype_of(value))
        return flat, self._tokens[each]

    def _put_back(self, value: fx.Node, places: fx.Node, readers: list[fx.Node]) -> None:
        """Rows of a value where they came from, in front of the first of those who read them so."""
        first = readers[0]
        same = first.op == "output" or first.meta["phase"] == value.meta["phase"]
        back = self._returned(value, places, first, value if same else first)
        for reader in readers:
            reader.replace_input_with(value, back)

    def _returned(self, value: fx.Node, places: fx.Node, point: fx.Node, like: fx.Node) -> fx.Node:
        """Rows of `value` where others read them."""
        return self._select(value, places, point, like)

    def _select(self, value: fx.Node, index: fx.Node, point: fx.Node, like: fx.Node) -> fx.Node:
        node = self._insert(point, experts.rows_at, (value, index), like)
        node.meta.update(local_shape=(*shape_of(index), *shape_of(value)[1:]), dtype=dtype_of(value))
        return node

    def _insert(
        self, point: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node, **options: Any
    ) -> fx.Node:
        """A call in front of `point`, of the phase and the operator of `like`."""
        with self._graph.inserting_before(point):
            node = self._graph.call_function(target, args, options)
        node.meta = {key: like.meta[key] for key in ("phase", "operator")}
        return node
