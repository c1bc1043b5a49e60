"""Layers of experts in chunks of their tokens: the rows of one chunk travel beside the products of another.

    y = dispatched_expert_linear(x, w, ids)             y0 = dispatched_expert_linear(x[:4], w, ids[:4])
    h = silu(y)                                         y1 = dispatched_expert_linear(x[4:], w, ids[4:])
    d = dispatched_expert_outer(x, g, ids)      -->     h = cat([silu(y0), silu(y1)])
                                                        d = dispatched_expert_outer(x[:4], g[:4], ids[:4]) + ...

What runs in the order of the experts does so chunk by chunk. To `sort_by_expert` each chunk is a layer with an order
and sizes of its own, of whose tokens each travels once to a rank. Sums over rows are added up over the chunks; rows and
sums over the rows of a token stand one behind the other. Every rank of a group cuts its tokens into as many chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.graphs.node_values import VIEWS, describe_values
from autopar.graphs.rows_per_rank import busiest_rows
from autopar.layouts.placement import Partial
from autopar.ops.dispatch import Dispatch
from autopar.passes.kernels.expert_layer import LINEAR, OUTER, behind_inputs, ids_of
from autopar.passes.kernels.graph_patterns import dtype_of, shape_of
from autopar.passes.kernels.ordered_rows import OrderedRows, has_several, viewed
from autopar.passes.kernels.row_wise import RowWise
from autopar.passes.kernels.token_copies import copied_tokens, token_sums

_aten = torch.ops.aten
FEWEST_TOKENS = 2
"""Of a chunk: of a single row nobody could say which dim is the rows."""
_PRODUCTS = LINEAR | OUTER


def can_be_cut(there: Dispatch | None, rows: OrderedRows, each: int, chunks: int) -> bool:
    """Whether a layer can run in chunks, which is so on every rank of its group or on none: rows travel as they come,
    each rank has tokens enough, and what sums over rows adds them up.

    rows: what runs in the order of its experts; each: rows of a token. Copies of experts are handed out once for all
    rows, and with a capacity the places are those of all rows: such layers stay whole.
    """
    if there is None or there.room is not None or there.replicated or there.fewest < FEWEST_TOKENS * chunks * each:
        return False
    return all(_adds_up(node) for node in rows.inside if not rows.is_ordered(node)) and all(
        user in rows.inside for node in rows.inside if has_several(node) for user in node.users
    )


def _adds_up(node: fx.Node) -> bool:
    """Whether a call returns sums over rows, or rows itself."""
    layout = node.meta.get("layout", ())
    return node.target in OUTER or all(one == Partial() for one in layout if isinstance(one, Partial))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a layer, or all of it: its products, and what runs in the order of their experts, where that is
    known."""

    products: list[fx.Node]
    rows: OrderedRows | None = None


def cut_layer(
    graph: fx.Graph, products: Sequence[fx.Node], rows: OrderedRows, each: int, chunks: int
) -> list[Chunk]:
    """Write a layer in chunks in the place of the whole. Returns these."""
    writer = _Writer(graph, ids_of(products[0]), rows, each, chunks)
    return writer.write(products)


class _Writer:
    """bounds: rows in front of every chunk, and all; parts: of every call; slices: of what these read; ways: how the
    calls of every chunk treat rows."""

    def __init__(self, graph: fx.Graph, ids: fx.Node, rows: OrderedRows, each: int, chunks: int) -> None:
        self._graph, self._rows, self._each = graph, rows, each
        self._count = shape_of(ids)[0]
        tokens = self._count // each
        self._bounds = [each * (tokens * part // chunks) for part in range(chunks + 1)]
        self._parts: dict[fx.Node, list[fx.Node]] = {}
        self._slices: dict[object, list[fx.Node]] = {}
        self._ways: list[dict[fx.Node, RowWise]] = [{} for _ in range(chunks)]
        self._ids = self._sliced(ids, behind_inputs(ids), ids)

    def write(self, products: Sequence[fx.Node]) -> list[Chunk]:
        """The chunks; the whole layer is erased."""
        inside = sorted(self._rows.inside)
        for node in inside:
            self._parts[node] = [self._part(node, part) for part in range(len(self._ways))]
        chunks = [
            Chunk([self._parts[product][part] for product in products], OrderedRows.given(ways))
            for part, ways in enumerate(self._ways)
        ]
        for node in inside:
            others = [user for user in node.users if user not in self._parts]
            if others:
                self._hand_out(node, sorted(others))
        for node in reversed(inside):
            self._graph.erase_node(node)
        return chunks

    def _rows_of(self, part: int) -> int:
        return self._bounds[part + 1] - self._bounds[part]

    def _part(self, node: fx.Node, part: int) -> fx.Node:
        """The call on the rows of a chunk."""
        with_rows = self._rows.operands(node)

        def of_part(operand: fx.Node) -> fx.Node:
            if operand in self._parts:
                return self._parts[operand][part]
            if node.target in _PRODUCTS and operand is ids_of(node):
                return self._ids[part]
            if operand in with_rows:
                return self._sliced(operand, node, node)[part]
            is_constant = operand.target is _aten.full.default and shape_of(operand)[:1] == (self._count,)
            return self._constant(operand, part, node) if is_constant else operand

        arguments = self._arguments(node, part)
        args, kwargs = fx.node.map_arg((arguments, dict(node.kwargs)), of_part)
        found = self._insert(node, node.target, args, node, **kwargs)
        found.meta = {key: value for key, value in node.meta.items() if key != "val"}
        found.meta["local_shape"] = self._shape(node, part)
        describe_values([found])
        returns_rows = self._rows.is_ordered(node)
        self._ways[part][found] = RowWise(tuple(of_part(one) for one in with_rows), returns_rows)
        return found

    def _arguments(self, node: fx.Node, part: int) -> tuple[Any, ...]:
        """Those of the whole layer, but for numbers of rows."""
        arguments: tuple[Any, ...] = node.args
        if node.target in _PRODUCTS:
            there = arguments[-1]
            return (*arguments[:-1], _of_rows(there, self._rows_of(part)))
        if node.target in VIEWS and node.target is not _aten.permute.default:
            return (arguments[0], [self._rows_of(part), *arguments[1][1:]])
        return arguments

    def _shape(self, node: fx.Node, part: int) -> tuple[Any, ...]:
        shape: tuple[Any, ...] = node.meta["local_shape"]
        if not self._rows.is_ordered(node):
            return shape
        rows = self._rows_of(part)
        return tuple((rows, *one[1:]) for one in shape) if has_several(node) else (rows, *shape[1:])

    def _constant(self, node: fx.Node, part: int, point: fx.Node) -> fx.Node:
        size = (self._rows_of(part), *shape_of(node)[1:])
        found = self._insert(point, node.target, (list(size), *node.args[1:]), node, **node.kwargs)
        found.meta.update(local_shape=size, dtype=dtype_of(node))
        return found

    def _sliced(self, value: fx.Node, point: fx.Node, like: fx.Node) -> list[fx.Node]:
        """Rows of a value by chunk; of one that copies tokens, copies of the tokens of each."""
        key = (viewed(value), shape_of(value))
        if key not in self._slices:
            found = copied_tokens(value)
            tokens = None if found is None or found[1] != self._each else found[0]
            self._slices[key] = [
                self._slice(value, 1, part, point, like) if tokens is None else self._copies(tokens, part, point, like)
                for part in range(len(self._ways))
            ]
        return self._slices[key]

    def _slice(self, value: fx.Node, rows: int, part: int, point: fx.Node, like: fx.Node) -> fx.Node:
        """Of a value for `rows` rows in one, those of a chunk."""
        begin, end = (self._bounds[at] // rows for at in (part, part + 1))
        found = self._insert(point, _aten.slice.Tensor, (value, 0, begin, end), like)
        found.meta.update(local_shape=(end - begin, *shape_of(value)[1:]), dtype=dtype_of(value))
        return found

    def _copies(self, tokens: fx.Node, part: int, point: fx.Node, like: fx.Node) -> fx.Node:
        """Rows of a chunk, copies of tokens (..., 1, D)."""
        width, count = shape_of(tokens)[-1], self._rows_of(part) // self._each
        flat = self._viewed(tokens, (self._count // self._each, width), point, like)
        single = self._viewed(self._slice(flat, self._each, part, point, like), (count, 1, width), point, like)
        shape = (count, self._each, width)
        copies = self._insert(point, _aten.expand.default, (single, list(shape)), like)
        copies.meta.update(local_shape=shape, dtype=dtype_of(tokens))
        return self._viewed(copies, (self._rows_of(part), width), point, like)

    def _viewed(self, value: fx.Node, shape: tuple[int, ...], point: fx.Node, like: fx.Node) -> fx.Node:
        found = self._insert(point, _aten.reshape.default, (value, list(shape)), like)
        found.meta.update(local_shape=shape, dtype=dtype_of(value))
        return found

    def _hand_out(self, node: fx.Node, readers: list[fx.Node]) -> None:
        """What others read of a call: its rows, sums over the rows of every token, or a sum over all rows."""
        parts = self._parts[node]
        if not self._rows.is_ordered(node):
            node.replace_all_uses_with(self._added(parts, node), lambda user: user in readers)
            return
        rest = []
        for reader in readers:
            sums = token_sums(reader, node, self._each) if self._each > 1 else None
            if sums is None:
                rest.append(reader)
                continue
            for total in sums:
                joined = self._joined([self._token_sum(one, total) for one in parts], total, total)
                total.replace_all_uses_with(self._like(joined, total))
                self._graph.erase_node(total)
            self._graph.erase_node(reader)
        if rest:
            like = node if rest[0].op == "output" or rest[0].meta["phase"] == node.meta["phase"] else rest[0]
            joined = self._like(self._joined(parts, rest[0], like), node)
            node.replace_all_uses_with(joined, lambda user: user in rest)

    def _token_sum(self, rows: fx.Node, total: fx.Node) -> fx.Node:
        """Sums over the rows of every token of a chunk (tokens, D)."""
        count, *row = shape_of(rows)
        by_token = self._viewed(rows, (count // self._each, self._each, *row), total, total)
        found = self._insert(total, _aten.sum.dim_IntList, (by_token, [1]), total)
        found.meta.update(local_shape=(count // self._each, *row), dtype=dtype_of(total))
        return found

    def _joined(self, parts: list[fx.Node], point: fx.Node, like: fx.Node) -> fx.Node:
        found = self._insert(point, _aten.cat.default, (parts,), like)
        rows = sum(shape_of(one)[0] for one in parts)
        found.meta.update(local_shape=(rows, *shape_of(parts[0])[1:]), dtype=dtype_of(parts[0]))
        return found

    def _added(self, parts: Sequence[fx.Node], node: fx.Node) -> fx.Node:
        found = parts[0]
        for one in parts[1:]:
            found = self._insert(node, _aten.add.Tensor, (found, one), node)
            found.meta = {key: value for key, value in node.meta.items() if key != "val"}
        return found

    def _like(self, value: fx.Node, meant: fx.Node) -> fx.Node:
        """The value in the shape of another, in whose place it stands and as which it was planned."""
        if shape_of(value) != shape_of(meant):
            value = self._viewed(value, shape_of(meant), value.next, value)
        value.meta |= {key: each for key, each in meant.meta.items() if key not in ("val", "phase")}
        return value

    def _insert(self, point: fx.Node, target: Any, args: tuple[Any, ...], like: fx.Node, **options: Any) -> fx.Node:
        """A call in front of `point`, of the phase and the operator of `like`."""
        with self._graph.inserting_before(point):
            node = self._graph.call_function(target, args, options)
        node.meta = {key: like.meta[key] for key in ("phase", "operator") if key in like.meta}
        return node


def _of_rows(there: Dispatch, rows: int) -> Dispatch:
    """Where experts are, of a chunk with so many rows: fewer of them lie further from their mean."""
    hops, parts = [], 1
    for hop in there.hops:
        parts *= hop.ranks
        busiest = busiest_rows(there.shares, (), parts, parts * max(rows, 1))
        hops.append(
            hop._replace(
                busiest=parts * busiest.computed,
                travels=busiest.received / max(busiest.computed, 1e-30),
                fullest=parts * busiest.fullest,
            )
        )
    return there._replace(hops=tuple(hops))
