"""Products of experts to each of which every rank sends as many rows (`ops/capped_rows.py`): sizes are known here, and
no such list is exchanged; what runs between products is what `zero_rows.py` lets."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graphs.expert_loads import module_of
from autopar.passes.kernels.dispatched_layer import DispatchedLayer
from autopar.passes.kernels.graph_patterns import shape_of
from autopar.passes.kernels.ordered_rows import OrderedRows
from autopar.passes.kernels.row_wise import RowWise
from autopar.passes.kernels.travelling_layer import Exchange, Rows
from autopar.passes.kernels.zero_rows import rows_with_zeros

_ours = torch.ops.autopar


class CappedLayer(DispatchedLayer):
    """Products to whose experts every rank sends as many rows: zeros where it has fewer, and no more."""

    def _ordered_rows(self, reads: dict[fx.Node, RowWise], every: list[fx.Node]) -> OrderedRows:
        return rows_with_zeros(reads, self._ids, every, self._may_join)

    def _order(self, first: fx.Node) -> list[fx.Node]:
        there, held, rows = self._there, self._experts[0], shape_of(self._ids)
        count = there.ranks * self._sent_to_each()
        came = (count,)
        arguments = (self._ids, *there[:4], there.room, held, module_of(first), there.order)
        shapes = (came, rows, came, came, (held,))
        behind = self._behind()
        begun = behind.prev
        found = self._items(behind, _ours.capped_order.default, arguments, shapes, first)
        self._once(begun.next, behind)
        order, places, regrouped, ungrouped, each = found
        self._by_row.stations += [Rows(order, places), Rows(regrouped, ungrouped)]
        self._by_row.exchanges.append(
            Exchange(hop=there.hops[0], sizes=None, home=count, came=count, parts=(), more=1.0)
        )
        return [order, places, each]

    def _sent_to_each(self) -> int:
        """Rows that go from one rank to another."""
        assert self._there.room is not None
        return self._there.block * self._there.room

    def _list(self, exchange: Exchange, side: int, phase_of: fx.Node) -> list[int]:
        return [self._sent_to_each()] * self._there.ranks

    def _select(self, value: fx.Node, index: fx.Node, point: fx.Node, like: fx.Node) -> fx.Node:
        """Orders of what came have no gaps; places of rows that were dropped do, and those that no row took."""
        node = super()._select(value, index, point, like)
        if index not in self._by_row.stations[-1]:
            node.args = (*node.args, True)
        return node

    def _varies(self, node: fx.Node, more: float | None) -> fx.Node:
        """The node: all rows are known before they come."""
        return node
