"""Products of experts whose rows travel: to the rank of their expert where they are put in order, back where they are
put back, by lists of sizes that are exchanged first (`ops/dispatch.py`).

    Pairs               tokens in place of their rows, once to a rank (`ops/dispatched_tokens.py`)
    DispatchedLayer     rows as they come: no call between products names their number
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.graphs.expert_loads import EXCHANGED, module_of
from autopar.graphs.node_values import VARYING, VIEWS
from autopar.graphs.rows_per_rank import ExchangedRows, once_per_rank, sent_parts
from autopar.layouts.placement import Partial, Shard
from autopar.ops import dispatch
from autopar.ops import dispatched_tokens as tokens
from autopar.ops.dispatch import Dispatch
from autopar.passes.kernels.expert_layer import ExpertLayer, reads_rows
from autopar.passes.kernels.graph_patterns import dtype_of, shape_of
from autopar.passes.kernels.in_turns import Movements
from autopar.passes.kernels.ordered_rows import OrderedRows, has_several
from autopar.passes.kernels.row_wise import RowWise
from autopar.passes.kernels.token_copies import token_sums
from autopar.passes.kernels.travelling_rows import TravellingRows, rows_of_a_token

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_ours = torch.ops.autopar
ROUNDING = 1e-6
"""Of a row: so much above a whole number is what floats add."""
LAID_OUT = ("val", "layout", "global_shape", "output")
"""Keys in the meta of a value that lies as its operator was planned."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Tokens that travel once to a rank, of `ops/dispatched_tokens.py`. each: rows of a token; sizes: of `pair_sizes`;
    tokens: of the pairs that go; index: the pair of every row that came; there, home: by what rows are summed."""

    each: int
    sizes: fx.Node
    tokens: fx.Node
    index: fx.Node
    there: tuple[fx.Node, fx.Node, fx.Node]
    home: tuple[fx.Node, fx.Node, fx.Node]


class DispatchedLayer(ExpertLayer):
    """Products whose rows travel to the rank that has their expert."""

    def __init__(
        self,
        graph: fx.Graph,
        products: list[fx.Node],
        every: list[fx.Node],
        there: Dispatch,
        axis_names: Sequence[str],
        rows: OrderedRows | None = None,
    ) -> None:
        self._there = there
        self._more = max(1.0, there.fullest / max(there.busiest, 1e-30))
        each = rows_of_a_token(one for product in products for one in reads_rows(product).operands)
        self._each = 1 if once_per_rank(*self._routed, each) is None else each
        self._axes = [axis_names.index(name) for name in there.group.split("+")]
        super().__init__(graph, products, every, rows)
        self._lists: dict[tuple[str, int, fx.Node], fx.Node] = {}
        self._pairs: Pairs | None = None
        self._replicas: dict[fx.Node, fx.Node] = {}
        self._exchanges: list[fx.Node] = []

    def _ordered_rows(self, reads: dict[fx.Node, RowWise], every: list[fx.Node]) -> OrderedRows:
        kind = OrderedRows if self._each > 1 else TravellingRows
        return kind(reads, self._ids, every, self._may_join)

    def rewrite(self) -> None:
        """As of any layer; and calls between products name no number of rows."""
        super().rewrite()
        for node in sorted(self._rows.inside):
            self._free_rows(node)
            if self._there.replicated and node.target is _ours.sorted_expert_linear.default:
                self._read_replicas(node)
            elif self._there.replicated and node.target is _ours.sorted_expert_outer.default:
                self._add_replicas(node)
        for node in self._rows.inside:
            self._as_they_come(node)
            if self._rows.is_ordered(node):
                self._is_there(node)

    def movements(self) -> Movements:
        """What moves and what computes, of a layer that was written."""
        return Movements(tuple(self._exchanges), tuple(sorted(self._rows.inside)))

    def _is_there(self, node: fx.Node) -> None:
        """Write into a node that its rows are those that came, which lie in no layout."""
        shapes = [one.shape for one in node.meta["val"]] if has_several(node) else [shape_of(node)]
        there = tuple((self._rows_there(rows), *others) for rows, *others in shapes)
        is_one = not has_several(node)
        for key in LAID_OUT:
            node.meta.pop(key, None)
        node.meta |= {"local_shape": there[0] if is_one else there}
        self._as_they_come(node, self._more)

    def _may_join(self, node: fx.Node, how: RowWise) -> bool:
        """Rows of other ranks of the group are among those that are here. So nothing but rows may be split over it, and
        what sums over rows must be a part of the sum over the group."""
        if has_several(node):
            return all(self._may_join(item, how) for item in node.users)
        if node.target in VIEWS and "layout" not in node.meta:
            return True
        placed = [layout[axis] for axis in self._axes] if (layout := node.meta.get("layout")) else [None]
        if not how.returns_rows:
            return all(isinstance(one, Partial) for one in placed)
        return all(isinstance(one, Shard) and one.dim == 0 for one in placed)

    def _order(self, first: fx.Node) -> list[fx.Node]:
        """Order and places of the own rows, and the rows per expert behind the exchange."""
        there, behind, replicas = self._there, self._behind(), len(self._there.replicated)
        begun = behind.prev
        rows, held, width = shape_of(self._ids), self._experts[0], there.block + replicas + 1
        buckets = (there.ranks * width,)
        self._home, there_rows = rows, (self._rows_there(rows[0]),)
        arguments = (self._ids, *there[:5], list(there.replicated))
        order, places, counts = self._items(
            behind, _ours.dispatch_order.default, arguments, (rows, rows, buckets), first
        )
        each, pairs = self._each, None
        if each > 1:
            pairs = self._token_pairs(order, counts, each, behind, first)
        table, came = self._sent_counts(counts, None if pairs is None else pairs[-1], width, behind, first)
        replicated = [expert - there.start for expert in there.replicated]
        planned = math.ceil(rows[0] * there.fullest)
        said = (counts, table, there.ranks, there.experts, replicated, module_of(first), planned)
        self._sizes = self._insert(behind, dispatch.row_sizes, said, first)
        self._sizes.meta |= {"local_shape": (2, there.ranks), "dtype": torch.int64, VARYING: 1.0}
        shapes = (there_rows, there_rows, (held + replicas,))
        self._regrouped, self._ungrouped, each_held = self._items(
            behind, dispatch.received_order, (table, self._sizes, there.ranks, held, replicas), shapes, first
        )
        self._as_they_come(self._regrouped.all_input_nodes[0], self._more)
        if pairs is not None and came is not None:
            self._pairs = self._received_pairs(each, pairs, table, came, behind, first)
        self._once(begun.next, behind)
        return [order, places, each_held]

    @property
    def _routed(self) -> tuple[tuple[float, ...], tuple[int, ...], int]:
        """What `sent_parts` and `once_per_rank` ask for."""
        there = self._there
        return there.shares, tuple(expert - there.start for expert in there.replicated), there.ranks

    def _token_pairs(
        self, order: fx.Node, counts: fx.Node, each: int, behind: fx.Node, first: fx.Node
    ) -> list[fx.Node]:
        """What `token_pairs` returns."""
        (rows,), ranks = shape_of(order), self._there.ranks
        shapes = [(rows,), (rows,), (rows,), (rows // each,), (ranks,)]
        found = self._items(behind, _ours.token_pairs.default, (order, counts, ranks, each), shapes, first)
        found[1].meta["dtype"] = torch.int32
        found[1].all_input_nodes[0].meta["dtype"] = tuple(one.meta["dtype"] for one in found)
        return found

    def _sent_counts(
        self, counts: fx.Node, pairs: fx.Node | None, width: int, behind: fx.Node, first: fx.Node
    ) -> tuple[fx.Node, fx.Node | None]:
        """The counts of all ranks for this one, and of the pairs."""
        ranks = self._there.ranks
        if pairs is None:
            return self._sent(counts, ([width] * ranks,) * 2, (ranks * width,), behind, first), None
        both = self._insert(behind, tokens.with_pairs, (counts, pairs), first)
        both.meta.update(local_shape=(ranks * (width + 1),), dtype=torch.int64)
        came = self._sent(both, ([width + 1] * ranks,) * 2, shape_of(both), behind, first)
        table, came_pairs = self._items(
            behind, tokens.without_pairs, (came, ranks), ((ranks * width,), (ranks,)), first
        )
        return table, came_pairs

    def _received_pairs(
        self, each: int, pairs: list[fx.Node], table: fx.Node, came: fx.Node, behind: fx.Node, first: fx.Node
    ) -> Pairs:
        """Who has which tokens, exchanged by the places of all rows."""
        pair_tokens, places, back, lengths, of_rank = pairs
        ranks, there_rows = self._there.ranks, shape_of(self._regrouped)
        sizes = self._insert(behind, tokens.pair_sizes, (of_rank, came), first)
        sizes.meta |= {"local_shape": (2, ranks), "dtype": torch.int64, VARYING: 1.0}
        stays = bool(self._there.replicated) or math.fsum(self._there.shares) < 1.0 - ROUNDING
        part = min(1.0, math.fsum(sent_parts(*self._routed, each)) + stays / each)
        home, there = (math.ceil(part * rows - ROUNDING) for rows in (self._home[0], there_rows[0]))
        sent = self._sent_rows(places, False, there_rows, behind, first)
        arguments = (sent, table, came, sizes, self._regrouped)
        index, order, of_pair = self._items(
            behind, tokens.received_tokens, arguments, (there_rows, there_rows, (there,)), first
        )
        self._as_they_come(index.all_input_nodes[0], self._more)
        cut = [self._insert(behind, tokens.first_pairs, (one, sizes), first) for one in (pair_tokens, back)]
        for node in cut:
            node.meta.update(local_shape=(home,), dtype=torch.int64)
            self._as_they_come(node)
        return Pairs(each, sizes, cut[0], index, (index, order, of_pair), (cut[0], cut[1], lengths))

    def _once(self, node: fx.Node, end: fx.Node) -> None:
        """Make nodes up to an end part of no operator that may be recomputed: rows are counted and waited for once."""
        while node is not end:
            node.meta["operator"] = f"{module_of(node)}/row_order"
            node = node.next

    def _items(
        self, point: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], shapes: Sequence[Any], like: fx.Node
    ) -> list[fx.Node]:
        """The outputs of a call, int64 all."""
        call = self._insert(point, target, args, like)
        call.meta.update(local_shape=tuple(shapes), dtype=(torch.int64,) * len(shapes))
        items = [self._insert(point, operator.getitem, (call, item), like) for item in range(len(shapes))]
        for item, shape in zip(items, shapes, strict=True):
            item.meta.update(local_shape=shape, dtype=torch.int64)
        return items

    def _rows_there(self, rows: int) -> int:
        """Rows behind an exchange, of the busiest rank."""
        return math.ceil(rows * self._there.busiest - ROUNDING)

    def _sent(
        self, rows: fx.Node, splits: tuple[Any, Any], came: tuple[int, ...], point: fx.Node, like: fx.Node
    ) -> fx.Node:
        """What comes of rows that go to the ranks of the group, of shape `came`; splits: what comes, and what goes."""
        return self._collective(_c10d.all_to_all_single.default, (rows, *splits), came, point, like)

    def _sent_rows(
        self,
        rows: fx.Node,
        back: bool,
        came: tuple[int, ...],
        point: fx.Node,
        like: fx.Node,
        pairs: Pairs | None = None,
    ) -> fx.Node:
        """What comes of rows that go to their experts, or back; of tokens, if these are pairs."""
        splits = self._list(0 if back else 1, like, pairs), self._list(1 if back else 0, like, pairs)
        waited, there = self._sent(rows, splits, came, point, like), self._there
        self._exchanges += waited.all_input_nodes
        if there.room is None:
            parts = sent_parts(*self._routed, 1 if pairs is None else pairs.each)
            waited.all_input_nodes[0].meta[EXCHANGED] = ExchangedRows(self._home[0], parts, back, there.travels)
        return waited

    def _collective(
        self, target: Callable[..., Any], args: tuple[Any, ...], shape: tuple[int, ...], point: fx.Node, like: fx.Node
    ) -> fx.Node:
        """What comes of a collective over the group, once it is there."""
        group = self._there.group
        described = {"local_shape": shape, "dtype": dtype_of(args[0])}
        started = self._insert(point, target, (*args, group), like)
        started.meta |= described | {"group_axes": tuple(group.split("+")), "full_bytes": 0}
        waited = self._insert(point, _c10d.wait_tensor.default, (started,), like)
        waited.meta |= described
        return waited

    def _list(self, side: int, phase_of: fx.Node, pairs: Pairs | None = None) -> fx.Node | list[int]:
        """What goes (0) or comes (1), as a list, which forward does not hand to backward."""
        sizes = self._sizes if pairs is None else pairs.sizes
        key = phase_of.meta["phase"], side, sizes
        if key not in self._lists:
            self._lists[key] = self._insert(sizes.next, dispatch.row_list, (sizes, side), sizes)
            self._lists[key].meta |= {
                "phase": key[0], "local_shape": (self._there.ranks,), "dtype": torch.int64, VARYING: 1.0,
            }  # fmt: skip
        return self._lists[key]

    def _arrived(self, source: fx.Node, index: fx.Node, reader: fx.Node) -> fx.Node:
        if self._pairs is not None and index is self._tokens.get(self._pairs.each):
            return self._arrived_tokens(self._pairs, source, reader)
        own = super()._arrived(source, index, reader)
        came = shape_of(self._regrouped) + shape_of(own)[1:]
        went = self._sent_rows(own, False, came, reader, own)
        for node in (went, went.all_input_nodes[0]):
            self._as_they_come(node, self._more)
        return self._as_they_come(super()._arrived(went, self._regrouped, reader), self._more)

    def _arrived_tokens(self, pairs: Pairs, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Rows of tokens, each of which travels once to a rank."""
        own = self._as_they_come(self._select(source, pairs.tokens, reader, reader))
        came = shape_of(pairs.there[2]) + shape_of(own)[1:]
        went = self._sent_rows(own, False, came, reader, own, pairs)
        for node in (went, went.all_input_nodes[0]):
            self._as_they_come(node, self._more)
        return self._as_they_come(self._select(went, pairs.index, reader, reader), self._more)

    def _put_back(self, value: fx.Node, places: fx.Node, readers: list[fx.Node]) -> None:
        """Rows where they came from; or, where the rows of a token are added up, sums of these from every rank."""
        others = []
        for reader in readers:
            sums = None if self._pairs is None else token_sums(reader, value, self._pairs.each)
            if self._pairs is None or sums is None:
                others.append(reader)
                continue
            for total in sums:
                self._sum_of_ranks(self._pairs, value, total)
        if others:
            super()._put_back(value, places, others)

    def _sum_of_ranks(self, pairs: Pairs, value: fx.Node, total: fx.Node) -> None:
        """In place of a sum over the rows of every token: sums there, and of what comes back."""
        like = value if total.meta["phase"] == value.meta["phase"] else total
        there = self._summed(value, pairs.there, total, like)
        self._as_they_come(there, self._more)
        home = shape_of(pairs.tokens) + shape_of(there)[1:]
        came = self._as_they_come(self._sent_rows(there, True, home, total, there, pairs))
        self._as_they_come(came.all_input_nodes[0])
        found = self._as_they_come(self._summed(came, pairs.home, total, like))
        if shape_of(total) != shape_of(found):
            found = self._insert(total, _aten.reshape.default, (found, list(shape_of(total))), like)
        kept = ("operator", "local_shape", "dtype", *LAID_OUT)
        found.meta |= {key: total.meta[key] for key in kept if key in total.meta}
        total.replace_all_uses_with(found)

    def _summed(
        self, rows: fx.Node, by: tuple[fx.Node, fx.Node, fx.Node], point: fx.Node, like: fx.Node
    ) -> fx.Node:
        node = self._insert(point, tokens.summed_rows, (rows, *by), like)
        node.meta.update(local_shape=shape_of(by[2]) + shape_of(rows)[1:], dtype=dtype_of(rows))
        return node

    def _returned(self, value: fx.Node, places: fx.Node, point: fx.Node, like: fx.Node) -> fx.Node:
        by_rank = self._as_they_come(super()._returned(value, self._ungrouped, point, like), self._more)
        home = self._home + shape_of(by_rank)[1:]
        came = self._sent_rows(by_rank, True, home, point, by_rank)
        return super()._returned(came, places, point, like)

    def _read_replicas(self, product: fx.Node) -> None:
        """Replicated experts behind the own ones of a linear product; their matrices are added up once for all."""
        weight, places = product.args[1], self._there.places
        assert isinstance(weight, fx.Node)
        held, *matrix = shape_of(weight)
        if weight not in self._replicas:
            own = self._insert(product, dispatch.replicas_held, (weight, places), product)
            own.meta.update(local_shape=(len(places), *matrix), dtype=dtype_of(weight))
            replicas = self._collective(_c10d.all_reduce.default, (own, "sum"), shape_of(own), product, product)
            self._replicas[weight] = replicas
        joined = self._insert(product, _aten.cat.default, ([weight, self._replicas[weight]],), product)
        joined.meta.update(local_shape=(held + len(places), *matrix), dtype=dtype_of(weight))
        product.args = (product.args[0], joined, *product.args[2:])

    def _add_replicas(self, product: fx.Node) -> None:
        """Of an outer product the own experts, those of them that are replicated added up over the group."""
        places, (held, *matrix), described = self._there.places, shape_of(product), dict(product.meta)
        behind, readers = product.next, list(product.users)
        for key in LAID_OUT:
            product.meta.pop(key, None)
        product.meta["local_shape"] = (held + len(places), *matrix)
        last = self._insert(behind, _aten.slice.Tensor, (product, 0, held, held + len(places)), product)
        last.meta.update(local_shape=(len(places), *matrix), dtype=dtype_of(product))
        replicas = self._collective(_c10d.all_reduce.default, (last, "sum"), shape_of(last), behind, product)
        own = self._insert(behind, dispatch.with_replicas, (product, replicas, places), product)
        own.meta = described
        for reader in readers:
            reader.replace_input_with(product, own)

    def _free_rows(self, node: fx.Node) -> None:
        """Sizes of a call between products: as many rows as there are."""
        if node.target in VIEWS and node.target is not _aten.permute.default:
            value, shape = node.args
            assert isinstance(shape, list | tuple)
            node.args = (value, [-1, *shape[1:]])
        count = shape_of(self._ids)[0]
        for operand in node.all_input_nodes:
            if operand.target is _aten.full.default and shape_of(operand)[:1] == (count,):
                like = next(one for one in self._rows.operands(node))
                with self._graph.inserting_before(node):
                    filled = self._graph.call_function(
                        dispatch.filled_rows, (like, list(shape_of(operand)[1:]), operand.args[1], dtype_of(operand))
                    )
                filled.meta = dict(operand.meta)
                self._is_there(filled)
                node.replace_input_with(operand, filled)

    def _as_they_come(self, node: fx.Node, planned: float = 1.0) -> fx.Node:
        """The node, which says that it makes or reads as many rows as come; planned: how many times the bytes that it
        says memory is for."""
        node.meta[VARYING] = planned
        return node
