"""A layer of experts whose rows travel, in one hop or in two: what is exchanged first, and how rows and tokens go and
come back.

    station     0 at home             1 between hops        2 at the experts
    rows        in order              in order again        by expert
    back        where they were       where they came       where they came
    tokens      once to every node    once to every rank    that of every row
    sums        of every token        of every token        of every token that came

Between two stations all is sent over the group of a hop. With one hop there is no station 1 (`ops/dispatch.py`,
`ops/dispatched_tokens.py`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import fx

from autopar.graphs.expert_loads import EXCHANGED, module_of
from autopar.graphs.node_values import VARYING
from autopar.graphs.rows_per_rank import ExchangedRows, hop_parts, once_per_rank, sent_parts
from autopar.ops import dispatch
from autopar.ops import dispatched_tokens as tokens
from autopar.ops.dispatch import Dispatch, Hop
from autopar.passes.kernels.expert_layer import ExpertLayer, reads_rows
from autopar.passes.kernels.graph_patterns import dtype_of, shape_of
from autopar.passes.kernels.ordered_rows import OrderedRows
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


class Rows(NamedTuple):
    """A station of rows: in what order they go on, and how those that come back are put where they were."""

    order: fx.Node
    places: fx.Node


class Tokens(NamedTuple):
    """A station of tokens: which one goes with every pair, or row; and, beside this, what `summed_rows` sums those by
    that come back."""

    token: fx.Node
    order: fx.Node
    lengths: fx.Node


Station = TypeVar("Station", Rows, Tokens)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What goes over a hop. sizes: of `row_sizes` or `pair_sizes`; home, came: how many, nominally, in front of it and
    behind; parts: of `ExchangedRows`; more: for how many times what came memory is planned."""

    hop: Hop
    sizes: fx.Node | None
    home: int
    came: int
    parts: tuple[float, ...]
    more: float


@dataclass(slots=True)
class Route(Generic[Station]):
    """The stations of rows, or of tokens, and the exchanges between them. varies: how many start at home does."""

    varies: bool
    stations: list[Station] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    def more(self, station: int) -> float | None:
        """For how many times the nominal number memory is planned at a station; None where that is known."""
        return self.exchanges[station - 1].more if station else (1.0 if self.varies else None)


class Arrived(NamedTuple):
    """Of a hop: the rows per rank and expert that came and the tokens per rank, and every row's place among these."""

    table: fx.Node
    tokens: fx.Node | None
    places: fx.Node | None


class TravellingLayer(ExpertLayer):
    """Products that run where their rows have come."""

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
        self._replicated = tuple(expert - there.start for expert in there.replicated)
        each = rows_of_a_token(one for product in products for one in reads_rows(product).operands)
        once = once_per_rank(there.shares, self._replicated, there.hops[0].ranks, each)
        self._each = 1 if once is None else each
        self._axes = [axis_names.index(name) for name in there.group.split("+")]
        super().__init__(graph, products, every, rows)
        self._home = shape_of(self._ids)
        self._lists: dict[tuple[str, int, fx.Node | None], fx.Node] = {}
        self._by_row: Route[Rows] = Route(varies=False)
        self._by_token: Route[Tokens] = Route(varies=True)
        self._started: list[fx.Node] = []

    def _ordered_rows(self, reads: dict[fx.Node, RowWise], every: list[fx.Node]) -> OrderedRows:
        kind = OrderedRows if self._each > 1 else TravellingRows
        return kind(reads, self._ids, every, self._may_join)

    def _order(self, first: fx.Node) -> list[fx.Node]:
        """Order and places of the own rows, and the rows per expert behind the last hop."""
        behind = self._behind()
        begun = behind.prev
        arrived = self._hop(0, None, behind, first)
        for number in range(1, len(self._there.hops)):
            arrived = self._hop(number, arrived, behind, first)
        held = self._at_experts(arrived, behind, first)
        self._once(begun.next, behind)
        return [*self._by_row.stations[0], held]

    def _hop(self, number: int, before: Arrived | None, point: fx.Node, first: fx.Node) -> Arrived:
        """One hop of all rows; before: what the one in front brought."""
        hop, (ids, start, experts, replicated) = self._there.hops[number], self._at_hop(before, point, first)
        (rows,), width, more = shape_of(ids), hop.block + len(replicated) + 1, self._by_row.more(number)
        arguments = (ids, start, experts, hop.block, hop.ranks, hop.position, replicated)
        shapes = ((rows,), (rows,), (hop.ranks * width,))
        order, places, counts = self._items(point, _ours.dispatch_order.default, arguments, shapes, first, more)
        pairs = self._token_pairs(hop, order, counts, before, point, first) if self._each > 1 else None
        table, came = self._sent_counts(hop, counts, None if pairs is None else pairs[-1], width, point, first)
        counted = 0 if before else experts
        copies = [expert - start for expert in replicated]
        planned = math.ceil(self._home[0] * hop.fullest)
        said = (counts, table, hop.ranks, counted, copies, module_of(first), planned, self._there.order)
        exchange = Exchange(
            hop=hop,
            sizes=self._sizes(dispatch.row_sizes, said, hop, point, first),
            home=rows,
            came=math.ceil(self._home[0] * hop.busiest - ROUNDING),
            parts=self._parts(number, 1),
            more=max(1.0, hop.fullest / max(hop.busiest, 1e-30)),
        )
        self._by_row.stations.append(Rows(order, places))
        self._by_row.exchanges.append(exchange)
        if pairs is None or came is None:
            return Arrived(table, None, None)
        self._pairs_go(number, pairs, came, exchange, point, first)
        return Arrived(table, came, self._sent_rows(pairs[1], exchange, False, exchange.more, point, first))

    def _at_hop(
        self, before: Arrived | None, point: fx.Node, first: fx.Node
    ) -> tuple[fx.Node, int, int, list[int]]:
        """The expert of every row in front of a hop; the first one and how many there are in its group, and which of
        them are replicated."""
        there = self._there
        if before is None:
            return self._ids, there.start, there.experts, list(there.replicated)
        last, experts = self._by_row.exchanges[-1], self._by_row.exchanges[-1].hop.block
        arguments = (before.table, last.sizes, last.hop.ranks)
        ids = self._index(dispatch.experts_that_came, arguments, last.came, last.more, point, first)
        return ids, 0, experts, list(range(experts, experts + len(there.replicated)))

    def _token_pairs(
        self, hop: Hop, order: fx.Node, counts: fx.Node, before: Arrived | None, point: fx.Node, first: fx.Node
    ) -> list[fx.Node]:
        """What `token_pairs` returns of the rows that go."""
        (rows,), more = shape_of(order), None
        target: Callable[..., Any] = _ours.token_pairs.default
        arguments: tuple[Any, ...] = (order, counts, hop.ranks, self._each)
        count = rows // self._each
        if before is not None:
            last = self._by_token.exchanges[-1]
            count, more, target = last.came, last.more, tokens.pairs_of_tokens
            whose = (before.places, before.table, before.tokens)
            token = self._index(tokens.tokens_that_came, whose, rows, more, point, first)
            arguments = (token, order, counts, hop.ranks, last.sizes)
        shapes = [(rows,), (rows,), (rows,), (count,), (hop.ranks,)]
        found = self._items(point, target, arguments, shapes, first, more)
        found[1].meta["dtype"] = torch.int32
        found[1].all_input_nodes[0].meta["dtype"] = tuple(one.meta["dtype"] for one in found)
        return found

    def _sent_counts(
        self, hop: Hop, counts: fx.Node, pairs: fx.Node | None, width: int, point: fx.Node, first: fx.Node
    ) -> tuple[fx.Node, fx.Node | None]:
        """The counts of all ranks for this one, and of the pairs."""
        ranks = hop.ranks
        if pairs is None:
            return self._sent(hop, counts, ([width] * ranks,) * 2, (ranks * width,), point, first), None
        both = self._insert(point, tokens.with_pairs, (counts, pairs), first)
        both.meta.update(local_shape=(ranks * (width + 1),), dtype=torch.int64)
        came = self._sent(hop, both, ([width + 1] * ranks,) * 2, shape_of(both), point, first)
        table, came_pairs = self._items(
            point, tokens.without_pairs, (came, ranks), ((ranks * width,), (ranks,)), first
        )
        return table, came_pairs

    def _pairs_go(
        self, number: int, pairs: list[fx.Node], came: fx.Node, rows: Exchange, point: fx.Node, first: fx.Node
    ) -> None:
        """The hop of tokens in place of rows."""
        stays = bool(self._replicated) or math.fsum(self._there.shares) < 1.0 - ROUNDING
        sent = sent_parts(self._there.shares, self._replicated, math.prod(self._ranks[: number + 1]), self._each)
        part = min(1.0, math.fsum(sent) + stays / self._each)
        exchange = Exchange(
            hop=rows.hop,
            sizes=self._sizes(tokens.pair_sizes, (pairs[-1], came), rows.hop, point, first),
            home=math.ceil(part * rows.home - ROUNDING),
            came=math.ceil(part * rows.came - ROUNDING),
            parts=self._parts(number, self._each),
            more=rows.more,
        )
        more = self._by_token.more(number)
        index, order = (
            self._index(tokens.first_pairs, (pairs[one], exchange.sizes), exchange.home, more, point, first)
            for one in (0, 2)
        )
        self._by_token.stations.append(Tokens(index, order, pairs[3]))
        self._by_token.exchanges.append(exchange)

    def _at_experts(self, arrived: Arrived, point: fx.Node, first: fx.Node) -> fx.Node:
        """The last station; returns the rows per expert there."""
        last, held, replicas = self._by_row.exchanges[-1], self._experts[0], len(self._replicated)
        shapes = ((last.came,), (last.came,), (held + replicas,))
        arguments: tuple[Any, ...] = (arrived.table, last.sizes, last.hop.ranks, held, replicas)
        *rows, each = self._items(point, dispatch.received_order, arguments, shapes, first, last.more)
        self._by_row.stations.append(Rows(*rows))
        if arrived.places is not None:
            of_tokens = self._by_token.exchanges[-1]
            arguments = (arrived.places, arrived.table, arrived.tokens, of_tokens.sizes, rows[0])
            shapes = ((last.came,), (last.came,), (of_tokens.came,))
            found = self._items(point, tokens.received_tokens, arguments, shapes, first, last.more)
            self._by_token.stations.append(Tokens(*found))
        return each

    @property
    def _ranks(self) -> tuple[int, ...]:
        """Of every hop."""
        return tuple(hop.ranks for hop in self._there.hops)

    def _parts(self, number: int, chosen: int) -> tuple[float, ...]:
        """`hop_parts` of a hop."""
        at = 0
        for hop in self._there.hops[:number]:
            at = at * hop.ranks + hop.position
        return hop_parts(self._there.shares, self._replicated, self._ranks[: number + 1], at, chosen)

    def _once(self, node: fx.Node, end: fx.Node) -> None:
        """Make nodes up to an end part of no operator that may be recomputed: rows are counted and waited for once."""
        while node is not end:
            node.meta["operator"] = f"{module_of(node)}/row_order"
            node = node.next

    def _items(
        self,
        point: fx.Node,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        shapes: Sequence[Any],
        like: fx.Node,
        more: float | None = None,
    ) -> list[fx.Node]:
        """The outputs of a call, int64 all."""
        call = self._insert(point, target, args, like)
        call.meta.update(local_shape=tuple(shapes), dtype=(torch.int64,) * len(shapes))
        self._varies(call, more)
        items = [self._insert(point, operator.getitem, (call, item), like) for item in range(len(shapes))]
        for item, shape in zip(items, shapes, strict=True):
            item.meta.update(local_shape=shape, dtype=torch.int64)
        return items

    def _index(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        count: int,
        more: float | None,
        point: fx.Node,
        like: fx.Node,
    ) -> fx.Node:
        """A call that returns int64 (count,)."""
        node = self._insert(point, target, args, like)
        node.meta.update(local_shape=(count,), dtype=torch.int64)
        return self._varies(node, more)

    def _sizes(
        self, target: Callable[..., Any], args: tuple[Any, ...], hop: Hop, point: fx.Node, like: fx.Node
    ) -> fx.Node:
        """A call that returns what goes and comes, on the host."""
        node = self._insert(point, target, args, like)
        node.meta |= {"local_shape": (2, hop.ranks), "dtype": torch.int64, VARYING: 1.0}
        return node

    def _sent(
        self, hop: Hop, rows: fx.Node, splits: tuple[Any, Any], came: tuple[int, ...], point: fx.Node, like: fx.Node
    ) -> fx.Node:
        """What comes of rows that go to the ranks of a hop, of shape `came`; splits: what comes, and what goes."""
        target = _c10d.all_to_all_single.default
        return self._collective(target, (rows, *splits), hop.group, came, point, like)

    def _sent_rows(
        self, rows: fx.Node, exchange: Exchange, back: bool, more: float | None, point: fx.Node, like: fx.Node
    ) -> fx.Node:
        """What comes of rows, or tokens, that go over a hop, or back; more: of where they come."""
        went, came = self._list(exchange, int(back), like), self._list(exchange, int(not back), like)
        shape = (exchange.home if back else exchange.came, *shape_of(rows)[1:])
        waited = self._sent(exchange.hop, rows, (came, went), shape, point, like)
        started = waited.all_input_nodes[0]
        self._started.append(started)
        if self._there.room is None:
            started.meta[EXCHANGED] = ExchangedRows(self._home[0], exchange.parts, back, exchange.hop.travels)
        self._varies(started, more)
        return self._varies(waited, more)

    def _collective(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        group: str,
        shape: tuple[int, ...],
        point: fx.Node,
        like: fx.Node,
    ) -> fx.Node:
        """What comes of a collective over a group, once it is there."""
        described = {"local_shape": shape, "dtype": dtype_of(args[0])}
        started = self._insert(point, target, (*args, group), like)
        started.meta |= described | {"group_axes": tuple(group.split("+")), "full_bytes": 0}
        waited = self._insert(point, _c10d.wait_tensor.default, (started,), like)
        waited.meta |= described
        return waited

    def _list(self, exchange: Exchange, side: int, phase_of: fx.Node) -> fx.Node | list[int]:
        """What goes (0) or comes (1), as a list, which forward does not hand to backward."""
        key, sizes = (phase_of.meta["phase"], side, exchange.sizes), exchange.sizes
        assert sizes is not None
        if key not in self._lists:
            self._lists[key] = self._insert(sizes.next, dispatch.row_list, (sizes, side), sizes)
            self._lists[key].meta |= {
                "phase": key[0], "local_shape": (exchange.hop.ranks,), "dtype": torch.int64, VARYING: 1.0,
            }  # fmt: skip
        return self._lists[key]

    def _arrived(self, source: fx.Node, index: fx.Node, reader: fx.Node) -> fx.Node:
        if self._by_token.stations and index is self._tokens.get(self._each):
            return self._gone(self._by_token, source, self._by_token.stations[0].token, reader)
        return self._gone(self._by_row, source, index, reader)

    def _gone(self, route: Route[Any], value: fx.Node, index: fx.Node, reader: fx.Node) -> fx.Node:
        """Rows of a value at home, at the last station; index: of those that go."""
        for station, exchange in enumerate(route.exchanges):
            own = self._varies(self._select(value, index, reader, reader), route.more(station))
            value = self._sent_rows(own, exchange, False, exchange.more, reader, reader)
            index = route.stations[station + 1][0]
        return self._varies(self._select(value, index, reader, reader), route.exchanges[-1].more)

    def _put_back(self, value: fx.Node, places: fx.Node, readers: list[fx.Node]) -> None:
        """Rows where they came from; or, where the rows of a token are added up, sums of these from every rank."""
        others = []
        for reader in readers:
            sums = token_sums(reader, value, self._each) if self._by_token.stations else None
            if sums is None:
                others.append(reader)
                continue
            for total in sums:
                self._sum_of_ranks(value, total)
        if others:
            super()._put_back(value, places, others)

    def _sum_of_ranks(self, value: fx.Node, total: fx.Node) -> None:
        """In place of a sum over the rows of every token: sums there, and of what comes back."""
        like = value if total.meta["phase"] == value.meta["phase"] else total
        came = self._come_back(self._by_token, value, self._summed, total, like)
        found = self._varies(self._summed(came, self._by_token.stations[0], total, like), 1.0)
        if shape_of(total) != shape_of(found):
            found = self._insert(total, _aten.reshape.default, (found, list(shape_of(total))), like)
        kept = ("operator", "local_shape", "dtype", *LAID_OUT)
        found.meta |= {key: total.meta[key] for key in kept if key in total.meta}
        total.replace_all_uses_with(found)

    def _come_back(
        self,
        route: Route[Station],
        value: fx.Node,
        put: Callable[[fx.Node, Station, fx.Node, fx.Node], fx.Node],
        point: fx.Node,
        like: fx.Node,
    ) -> fx.Node:
        """Of a value at the last station what comes home, put at every station as those are that came from there."""
        for station, exchange in reversed([*enumerate(route.exchanges)]):
            placed = self._varies(put(value, route.stations[station + 1], point, like), exchange.more)
            value = self._sent_rows(placed, exchange, True, route.more(station), point, placed)
        return value

    def _summed(self, rows: fx.Node, by: Tokens, point: fx.Node, like: fx.Node) -> fx.Node:
        node = self._insert(point, tokens.summed_rows, (rows, *by), like)
        node.meta.update(local_shape=shape_of(by.lengths) + shape_of(rows)[1:], dtype=dtype_of(rows))
        return node

    def _placed(self, rows: fx.Node, by: Rows, point: fx.Node, like: fx.Node) -> fx.Node:
        return self._select(rows, by.places, point, like)

    def _returned(self, value: fx.Node, places: fx.Node, point: fx.Node, like: fx.Node) -> fx.Node:
        came = self._come_back(self._by_row, value, self._placed, point, like)
        return super()._returned(came, places, point, like)

    def _varies(self, node: fx.Node, more: float | None) -> fx.Node:
        """The node, which says that it makes or reads as many rows as come, for so many times whose nominal number
        memory is planned; None: for as many as it says."""
        if more is not None:
            node.meta[VARYING] = more
        return node
