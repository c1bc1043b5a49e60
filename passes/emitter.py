"""Emitter: writes nodes of one rank's graph, each with its local shape, dtype, phase and operator.

    emit = Emitter(graph, mesh, rank)
    emit.at("forward", "mlp.fc/linear#0")
    total = emit.collective(c10d.all_reduce.default, x, ("sum",), axes=(1,), shape=(4, 8))

Shapes are computed from layouts, so nothing is ever run or traced to know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.layouts.placement import Layout, Mesh, local_shape

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A value in another layout. grows: the copy is larger than the value (a gather), on every rank alike."""

    value: str
    layout: Layout
    grows: bool


class Emitter:
    """A graph under construction for one rank of a mesh.

    `redistributes`: what copy is made while a redistribution is emitted; it goes into the meta of its nodes, so that
    the partition recognises copies of one value.
    """

    def __init__(self, graph: fx.Graph, mesh: Mesh, rank: int) -> None:
        self.graph = graph
        self.mesh = mesh
        self.coordinate = mesh.coordinate(rank)
        self.phase = "forward"
        self.operator = ""
        self.redistributes: Copy | None = None
        self._shapes: dict[tuple[Shape, Layout], Shape] = {}

    def at(self, phase: str, operator: str) -> None:
        """The following nodes belong to `operator` in `phase`."""
        self.phase = phase
        self.operator = operator

    def local_shape(self, shape: Shape, layout: Layout) -> Shape:
        """Shape of this rank's block of a tensor of global `shape`."""
        key = (shape, layout)
        if key not in self._shapes:
            self._shapes[key] = local_shape(shape, layout, self.mesh, self.coordinate)
        return self._shapes[key]

    def largest_block(self, shape: Shape, layout: Layout) -> int:
        """Elements of the block of the first rank: the largest one, and the same number on every rank."""
        return math.prod(local_shape(shape, layout, self.mesh, (0,) * len(self.mesh.shape)))

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        shape: Shape,
        dtype: torch.dtype,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """One call with a tensor result of local `shape`."""
        node = self.graph.create_node("call_function", target, args, kwargs or {})
        return self.describe(node, shape, dtype)

    def describe(self, node: fx.Node, shape: Any, dtype: Any) -> fx.Node:
        """Write the meta of a node; `shape` and `dtype` are tuples of such for several outputs."""
        node.meta.clear()
        node.meta.update(local_shape=shape, dtype=dtype, phase=self.phase, operator=self.operator)
        if self.redistributes is not None:
            node.meta["redistributes"] = self.redistributes
        return node

    def collective(
        self,
        target: Callable[..., Any],
        x: fx.Node,
        args: tuple[Any, ...],
        axes: tuple[int, ...],
        shape: Shape,
        full_elements: int = 0,
    ) -> fx.Node:
        """`target(x, *args, group)` over the mesh axes, followed by its wait; the result has local `shape`.

        full_elements: of the full buffer on the first rank, the same number on every rank; 0: never part of a bucket.
        No backend has collectives of complex numbers: they travel as pairs of real ones.
        """
        dtype = x.meta["dtype"]
        if dtype.is_complex:
            plain = self.call(aten.resolve_conj.default, (x,), x.meta["local_shape"], dtype)
            pairs = self.call(aten.view_as_real.default, (plain,), (*x.meta["local_shape"], 2), dtype.to_real())
            travelled = self.collective(target, pairs, args, axes, (*shape, 2))
            return self.call(aten.view_as_complex.default, (travelled,), shape, dtype)
        names = tuple(self.mesh.axis_names[axis] for axis in axes)
        started = self.call(target, (x, *args, "+".join(names)), shape, dtype)
        started.meta["group_axes"] = names
        started.meta["full_bytes"] = full_elements * dtype.itemsize
        return self.call(torch.ops._c10d_functional.wait_tensor.default, (started,), shape, dtype)

    def group_size(self, axes: tuple[int, ...]) -> int:
        """Ranks of a group over the mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)
