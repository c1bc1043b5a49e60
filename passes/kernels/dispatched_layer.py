"""Products of experts that run where rows have come (`travelling_layer.py`): no call between products names how many
these are. Weights of replicated experts are added up over all ranks of the group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.graphs.node_values import VIEWS
from autopar.layouts.placement import Partial, Shard
from autopar.ops import dispatch
from autopar.ops.dispatch import Dispatch
from autopar.passes.kernels.graph_patterns import dtype_of, shape_of
from autopar.passes.kernels.in_turns import Movements
from autopar.passes.kernels.ordered_rows import OrderedRows, has_several
from autopar.passes.kernels.row_wise import RowWise
from autopar.passes.kernels.travelling_layer import LAID_OUT, TravellingLayer

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_ours = torch.ops.autopar


class DispatchedLayer(TravellingLayer):
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
        super().__init__(graph, products, every, there, axis_names, rows)
        self._replicas: dict[fx.Node, fx.Node] = {}

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
            self._varies(node, 1.0)
            if self._rows.is_ordered(node):
                self._is_there(node)

    def movements(self) -> Movements:
        """What moves and what computes, of a layer that was written."""
        return Movements(tuple(self._started), tuple(sorted(self._rows.inside)))

    def _is_there(self, node: fx.Node) -> None:
        """Write into a node that its rows are those that came, which lie in no layout."""
        shapes = [one.shape for one in node.meta["val"]] if has_several(node) else [shape_of(node)]
        last = self._by_row.exchanges[-1]
        there = tuple((last.came, *others) for _, *others in shapes)
        is_one = not has_several(node)
        for key in LAID_OUT:
            node.meta.pop(key, None)
        node.meta |= {"local_shape": there[0] if is_one else there}
        self._varies(node, last.more)

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

    def _read_replicas(self, product: fx.Node) -> None:
        """Replicated experts behind the own ones of a linear product; their matrices are added up once for all."""
        weight, places = product.args[1], self._there.places
        assert isinstance(weight, fx.Node)
        held, *matrix = shape_of(weight)
        if weight not in self._replicas:
            own = self._insert(product, dispatch.replicas_held, (weight, places), product)
            own.meta.update(local_shape=(len(places), *matrix), dtype=dtype_of(weight))
            self._replicas[weight] = self._added_up(own, product, product)
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
        replicas = self._added_up(last, behind, product)
        own = self._insert(behind, dispatch.with_replicas, (product, replicas, places), product)
        own.meta = described
        for reader in readers:
            reader.replace_input_with(product, own)

    def _added_up(self, value: fx.Node, point: fx.Node, like: fx.Node) -> fx.Node:
        """Over all ranks of the group."""
        target = _c10d.all_reduce.default
        return self._collective(target, (value, "sum"), self._there.group, shape_of(value), point, like)

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
