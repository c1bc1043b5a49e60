"""Chunks of products: the collective of one chunk of rows runs beside the product of the next one.

    y = mm(a, w)                                  y0 = mm(a[:2], w); r0 = all_reduce(y0)
    z = wait_tensor(all_reduce(y))      -->       y1 = mm(a[2:], w); r1 = all_reduce(y1)
                                                  z = rows_joined([wait_tensor(r0), wait_tensor(r1)])

    x = wait_tensor(all_gather(b))                x0 = wait_tensor(all_gather(b[:1])); x1 = ... b[1:]
    y = mm(x, w)                        -->       y = rows_joined([mm(x0, w), mm(x1, w)])

A product behind which the ranks add up (row-parallel: all_reduce, reduce_scatter), and one in front of which they
gather its rows (column-parallel), leave nothing to compute while the wire is busy. In chunks of rows they do: every
row of a product is computed as before, so no bit changes. Where the ranks cut the rows themselves, a chunk takes its
part of every rank's block (`ops/row_chunks.py`).

Into how many chunks collectives of a kind are cut is the plan's choice (`Plan.product_chunks`), by playing the step
(`planner/one_mesh/bucket_sizes.py`). A product stays whole where that number does not divide its rows, where a block is
padded, and where anything else reads what would be cut; between two collectives it is cut for the first. Ranks of one
group see equal shapes there, so they cut alike.
Gradients and parameters travel in buckets instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from autopar._compat import LazyGraphModule
from autopar.graphs.collective_nodes import ALL_GATHER, CHUNK_OF, REDUCTIONS, Collectives, describe, waits_of
from autopar.graphs.graph_copies import copied
from autopar.ops.blocks import Cut, keeps_order, padded, pieces_first, pieces_joined
from autopar.ops.row_chunks import row_chunk, rows_joined
from autopar.passes.overlap.bucket_collectives import KINDS

_aten = torch.ops.aten
_MM = _aten.mm.default
_RESHAPES = frozenset({_aten.reshape.default, _aten.view.default})
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedProduct:
    """A product and the collective that brings its rows, or takes them away.

    way: the calls between the two, the product and the start of the collective left out, first to last. groups: blocks
    of ranks that stand one behind the other among the rows of the product.
    """

    product: fx.Node
    start: fx.Node
    wait: fx.Node
    way: tuple[fx.Node, ...]
    groups: int

    @property
    def kind(self) -> str:
        """Of the collective, as the plan names it."""
        return KINDS[self.start.target]

    def divides(self, chunks: int) -> bool:
        """Whether the rows of everything that is cut divide into so many chunks."""
        moved = (_rows(self.start.all_input_nodes[0]), _rows(self.start))
        by_groups = (self.product, *(node for node in self.way if node.target is not pieces_first))
        inside = () if self.groups > 1 else tuple(position for node in self.way for _, position, _ in _row_cuts(node))
        return all(size % chunks == 0 for size in (min(moved), *inside)) and all(
            _rows(node) % (self.groups * chunks) == 0 for node in by_groups
        )


def chunk_products(graph_module: GraphModule, chunks: Mapping[str, int]) -> GraphModule:
    """A copy in which products are cut into `chunks[kind]` chunks beside collectives of a kind; those of a kind that
    is not named stay whole."""
    return LazyGraphModule(graph_module, in_chunks(graph_module.graph, chunks))


def in_chunks(source: fx.Graph, chunks: Mapping[str, int]) -> fx.Graph:
    """As `chunk_products`, of a graph alone."""
    graph = copied(source)
    cut: set[fx.Node] = set()
    for found in list(chunked_products(describe(list(graph.nodes)))):
        count = chunks.get(found.kind, 1)
        if count > 1 and found.product not in cut and found.divides(count):
            _Writer(graph, found, count).write()
            cut.add(found.product)
    return graph


def chunked_products(collectives: Collectives) -> Iterator[ChunkedProduct]:
    """The products beside the collectives of a graph that can be cut, in the order of these."""
    for start in collectives.starts:
        if start.target not in KINDS or len(start.users) != 1 or not (waits := waits_of(start)):
            continue
        if start.target in REDUCTIONS and not collectives.is_last_reduction(start):
            found = _in_front_of(start, waits[0])
        elif start.target is ALL_GATHER and not collectives.is_early_gather(start):
            found = _behind(start, waits[0])
        else:
            found = None
        if found is not None:
            yield found


def _in_front_of(start: fx.Node, wait: fx.Node) -> ChunkedProduct | None:
    """A product that is read by nothing but a reduction."""
    way: list[fx.Node] = []
    node = start.all_input_nodes[0]
    while node.target is not _MM:
        if not _keeps_rows(node) or len(node.users) != 1:
            return None
        way.insert(0, node)
        node = node.all_input_nodes[0]
    return _checked(node, start, wait, way) if len(node.users) == 1 else None


def _behind(start: fx.Node, wait: fx.Node) -> ChunkedProduct | None:
    """A product of rows that are gathered for nothing else."""
    way: list[fx.Node] = []
    node = wait
    while len(node.users) == 1:
        (reader,) = node.users
        if reader.target is _MM:
            rows, weight = reader.args
            return _checked(reader, start, wait, way) if rows is node and weight is not node else None
        if not _keeps_rows(reader):
            return None
        way.append(reader)
        node = reader
    return None


def _keeps_rows(node: fx.Node) -> bool:
    """Whether a call is the same on a chunk of its rows, without padding."""
    arguments: tuple[Any, ...] = node.args
    if node.target is pieces_joined:
        return tuple(arguments[2]) == tuple(arguments[3])
    if node.target in (padded, pieces_first):
        return _shape(arguments[0]) == tuple(arguments[1 if node.target is padded else 2])
    return node.target in _RESHAPES or node.target is _aten.contiguous.default


def _checked(product: fx.Node, start: fx.Node, wait: fx.Node, way: list[fx.Node]) -> ChunkedProduct | None:
    """With the groups among the rows of the product: blocks of ranks where these cut dim 0, else one."""
    if not all(_rows(node) for node in (start.all_input_nodes[0], start, *way, product)):
        return None
    groups = 1
    if any(_row_cuts(node) and _keeps_order(node) for node in way):
        sent, received = _rows(start.all_input_nodes[0]), _rows(start)
        groups = max(sent // received, received // sent)
    return ChunkedProduct(product=product, start=start, wait=wait, way=tuple(way), groups=groups)


def _keeps_order(node: fx.Node) -> bool:
    arguments: tuple[Any, ...] = node.args
    return keeps_order(arguments[2], arguments[1])


def _row_cuts(node: fx.Node) -> list[Cut]:
    """How the ranks cut dim 0 where their pieces are laid out."""
    if node.target not in (pieces_first, pieces_joined):
        return []
    arguments: tuple[Any, ...] = node.args
    return [cut for cut in arguments[1] if cut[0] == 0]


def _rows(node: fx.Node) -> int:
    """Size of dim 0 of a value; 0 where it has none."""
    shape = _shape(node)
    return shape[0] if shape else 0


def _shape(node: fx.Node) -> Shape:
    return tuple(node.meta["local_shape"])


class _Writer:
    """Writes the chunks of one product in its place."""

    def __init__(self, graph: fx.Graph, found: ChunkedProduct, chunks: int) -> None:
        self._graph, self._found, self._chunks = graph, found, chunks

    def write(self) -> None:
        """The chunks, and what they join to in the place of what was read before; the old calls are erased."""
        found = self._found
        reduces = found.start.target in REDUCTIONS
        last = found.wait if reduces else found.product
        with self._graph.inserting_before(found.product):
            parts = [self._reduced(index) if reduces else self._gathered(index) for index in range(self._chunks)]
        with self._graph.inserting_before(last):
            joined = self._call(rows_joined, (parts, 1 if reduces else found.groups), last, _shape(last))
        last.replace_all_uses_with(joined)
        calls = (found.product, *found.way, found.start, found.wait)
        for node in reversed(calls if reduces else (found.start, found.wait, *found.way, found.product)):
            self._graph.erase_node(node)

    def _reduced(self, index: int) -> fx.Node:
        found = self._found
        rows, weight = found.product.args
        assert isinstance(rows, fx.Node)
        value = self._same(found.product, (self._chunk(rows, index, found.groups), weight))
        return self._travelled(self._along(value))

    def _gathered(self, index: int) -> fx.Node:
        found = self._found
        value = self._travelled(self._chunk(found.start.all_input_nodes[0], index, 1))
        return self._same(found.product, (self._along(value), found.product.args[1]))

    def _chunk(self, value: fx.Node, index: int, groups: int) -> fx.Node:
        shape = self._part(_shape(value))
        if groups > 1:
            return self._call(row_chunk, (value, groups, index, self._chunks), value, shape)
        return self._call(_aten.slice.Tensor, (value, 0, index * shape[0], (index + 1) * shape[0]), value, shape)

    def _along(self, value: fx.Node) -> fx.Node:
        for node in self._found.way:
            value = self._same(node, (value, *self._part_arguments(node)))
        return value

    def _part_arguments(self, node: fx.Node) -> tuple[Any, ...]:
        """The arguments behind the first one, for a chunk."""
        arguments: tuple[Any, ...] = node.args
        if node.target in _RESHAPES:
            return (list(self._part(_shape(node))),)
        if node.target is padded:
            return (self._part(arguments[1]),)
        if node.target in (pieces_first, pieces_joined):
            return (self._part_cuts(arguments[1]), *(self._part(shape) for shape in arguments[2:]))
        return ()

    def _part_cuts(self, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
        """With one group, what stands in front of the ranks among the rows is what is cut into chunks."""
        less = self._chunks if self._found.groups == 1 else 1
        return tuple((dim, position // less if dim == 0 else position, pieces) for dim, position, pieces in cuts)

    def _travelled(self, value: fx.Node) -> fx.Node:
        start = self._found.start
        started = self._same(start, (value, *start.args[1:]))
        started.meta["group_axes"] = start.meta["group_axes"]
        started.meta["full_bytes"] = start.meta.get("full_bytes", 0) // self._chunks
        started.meta[CHUNK_OF] = start.name
        return self._same(self._found.wait, (started,))

    def _same(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """The call of `node` on a chunk."""
        return self._call(node.target, args, node, self._part(_shape(node)))

    def _part(self, shape: Sequence[int]) -> Shape:
        return (shape[0] // self._chunks, *shape[1:])

    def _call(self, target: Any, args: tuple[Any, ...], like: fx.Node, shape: Shape) -> fx.Node:
        node = self._graph.create_node("call_function", target, args)
        place = self._found.start.meta if like.op == "placeholder" else like.meta
        node.meta = {name: place[name] for name in ("phase", "operator") if name in place}
        node.meta |= {"local_shape": shape, "dtype": like.meta["dtype"]}
        return node
