"""Buckets: reductions of gradients, and gathers of parameters, joined into fewer and larger collectives.

    a = wait_tensor(all_reduce(x))               f = packed([x, y])
    b = wait_tensor(all_reduce(y))      -->      w = wait_tensor(all_reduce_(f))
    return a, b                                  a, b = views of w
                                                 return a, b

A collective costs a start beside its bytes; a bucket pays one start, and the copies that pack it, and begins when the
last of its tensors is there (a gather: when the first is needed). How large buckets are is the plan's choice
(`Plan.bucket_bytes`), measured on the full buffer of the first rank, so that all ranks fill the same ones. A bucket
holds one kind of collective over one group in one dtype. Reduced gradients are views of their bucket.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from autopar.graphs.collective_nodes import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_IN_PLACE,
    REDUCE_SCATTER,
    WAIT,
    Collectives,
)
from autopar.ops.buckets import packed, packed_rows, rows_part

_aten = torch.ops.aten
KINDS: Mapping[Any, str] = {ALL_GATHER: "all_gather", ALL_REDUCE: "all_reduce", REDUCE_SCATTER: "reduce_scatter"}


@contextmanager
def in_buckets(
    graph: fx.Graph, nodes: Sequence[fx.Node], found: Collectives, bucket_bytes: Mapping[str, float]
) -> Iterator[list[fx.Node]]:
    """The graph with collectives joined up to `bucket_bytes[kind]`; a kind that is not named stays as it is. At the end
    the graph is as before, so that who tries many sizes copies nothing.

    nodes: of the graph, the output last; found: `describe(nodes)`. Yields the nodes in their order, and a bucket where
    it can begin, so that readers of its first tensors may stand in front of it: `early_order` sorts them.
    """
    order, written = _written(graph, nodes, buckets(found, bucket_bytes))
    try:
        yield order
    finally:
        for bucket in reversed(written):
            bucket.take_back()


def _written(
    graph: fx.Graph, nodes: Sequence[fx.Node], found: Iterable[list[fx.Node]]
) -> tuple[list[fx.Node], list[_Bucket]]:
    """(the nodes with buckets of these members, the buckets)."""
    joined: dict[fx.Node, list[fx.Node]] = {}
    written = []
    for members in found:
        # a gather is needed when its first tensor is, a reduction can begin when its last one is there
        at = members[0] if members[0].target is ALL_GATHER else members[-1]
        bucket = _Bucket(graph, members, at)
        written.append(bucket)
        new = bucket.write()
        joined.update((node, []) for member in members for node in (member, *member.users))
        joined[at] = new
    return [new for node in nodes for new in joined.get(node, (node,))], written


def buckets(found: Collectives, bucket_bytes: Mapping[str, float]) -> Iterator[list[fx.Node]]:
    """The starts that each bucket joins, two or more, in program order."""
    return (members for members in _filled(found, bucket_bytes) if len(members) > 1)


def _filled(found: Collectives, bucket_bytes: Mapping[str, float]) -> Iterator[list[fx.Node]]:
    open_buckets: dict[Hashable, list[fx.Node]] = {}
    filled: dict[Hashable, int] = {}
    for start in found.starts:
        limit = bucket_bytes.get(KINDS.get(start.target, ""), 0.0)
        size = start.meta.get("full_bytes", 0)
        if not limit or not size or not (found.is_early_gather(start) or found.is_last_reduction(start)):
            continue
        key = (start.target, start.args[1:], start.meta["dtype"], found.level[start])
        if key in open_buckets and filled[key] + size > limit:
            yield open_buckets.pop(key)
        filled[key] = size + (filled[key] if key in open_buckets else 0)
        open_buckets.setdefault(key, []).append(start)
    yield from open_buckets.values()


class _Bucket:
    """Writes the nodes of one bucket, and gives the readers of its members their parts."""

    def __init__(self, graph: fx.Graph, members: list[fx.Node], at: fx.Node) -> None:
        self._graph = graph
        self._members = members
        self._kind = members[0].target
        self._rest = members[0].args[1:]
        self._meta: dict[str, Any] = {
            name: at.meta[name] for name in ("phase", "operator", "dtype", "redistributes") if name in at.meta
        }
        self._written: list[fx.Node] = []
        self._readers: list[tuple[fx.Node, fx.Node, tuple[fx.Node, ...]]] = []

    def write(self) -> list[fx.Node]:
        """The new nodes, operands first."""
        operands = [member.all_input_nodes[0] for member in self._members]
        sent = sum(_elements(operand) for operand in operands)
        received = sum(_elements(member) for member in self._members)
        if self._kind is REDUCE_SCATTER:
            flat = self._call(packed_rows, (operands, self._rest[1]), (sent,))
        else:
            flat = self._call(packed, (operands,), (sent,))
        target = ALL_REDUCE_IN_PLACE if self._kind is ALL_REDUCE else self._kind
        started = self._call(target, (flat, *self._rest), (received,))
        started.meta["group_axes"] = self._members[0].meta["group_axes"]
        started.meta["full_bytes"] = sum(member.meta["full_bytes"] for member in self._members)
        whole = self._call(WAIT, (started,), (received,))
        parts = self._rows(whole) if self._kind is ALL_GATHER else self._views(whole)
        for member, part in zip(self._members, parts, strict=True):
            for wait in list(member.users):
                self._readers.append((wait, part, tuple(wait.users)))
                wait.replace_all_uses_with(part)
        return self._written

    def take_back(self) -> None:
        """Give the readers what they read before, and remove the new nodes. The last bucket goes first."""
        for wait, part, readers in self._readers:
            for reader in readers:
                reader.replace_input_with(part, wait)
        for node in reversed(self._written):
            self._graph.erase_node(node)

    def _views(self, whole: fx.Node) -> Iterator[fx.Node]:
        """Members one behind the other."""
        sizes = [_elements(member) for member in self._members]
        split = self._call(_aten.split_with_sizes.default, (whole, sizes), tuple((size,) for size in sizes))
        split.meta["dtype"] = (self._meta["dtype"],) * len(sizes)
        for index, member in enumerate(self._members):
            own = self._call(operator.getitem, (split, index), (sizes[index],))
            shape = tuple(member.meta["local_shape"])
            yield self._call(_aten.view.default, (own, list(shape)), shape)

    def _rows(self, whole: fx.Node) -> Iterator[fx.Node]:
        """Members cut into one piece per rank, and the pieces of a rank one behind the other."""
        ranks = self._rest[0]
        assert isinstance(ranks, int)
        lengths = [_elements(member) // ranks for member in self._members]
        for member, start in zip(self._members, itertools.accumulate(lengths, initial=0), strict=False):
            shape = tuple(member.meta["local_shape"])
            yield self._call(rows_part, (whole, ranks, start, shape), shape)

    def _call(self, target: Any, args: tuple[Any, ...], shape: tuple[Any, ...]) -> fx.Node:
        node = self._graph.create_node("call_function", target, args)
        node.meta.update(self._meta, local_shape=shape)
        self._written.append(node)
        return node


def _elements(node: fx.Node) -> int:
    return math.prod(node.meta["local_shape"])
