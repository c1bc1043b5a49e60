"""Local values: what every tensor of the captured graph is on one rank, in each layout in which it was asked for.

    values.get(node, (Shard(0), Replicate()), "forward")

Operators define values in the layout that they produce. Any other layout is a redistribution, emitted once per
(value, layout, phase). Views are folded: the wanted layout is mapped backwards to the tensor that the view looks at,
the redistribution happens there, and the view is applied to the local block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.errors import PlanMismatchError
from autopar.layouts.placement import Layout, Replicate, Shard, format_layout, is_legal
from autopar.layouts.redistribution import is_reachable
from autopar.passes.emitter import Copy, Emitter, Shape
from autopar.passes.lowering.emit_redistribution import emit_redistribution
from autopar.passes.view_layouts import layout_after_view, layout_before_view, permutation, viewed
from autopar.rules.engine import is_view

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalValue:
    """One tensor as its producer leaves it. shared: phase -> layouts that it passes on the way to its consumers;
    kept: backward takes the first shared copy of forward instead of making its own, and makes again what grows."""

    node: fx.Node
    shape: Shape
    layout: Layout
    phase: str
    operator: str
    shared: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
    kept: bool = False

    @property
    def saved(self) -> Layout:
        """The layout in which it is there in backward, too."""
        copies = self.shared.get("forward", ())
        return copies[0] if self.kept and copies else self.layout


class LocalValues:
    """The values of one lowering; keys are nodes of the captured graph."""

    def __init__(self, emit: Emitter) -> None:
        self._emit = emit
        self._values: dict[fx.Node, LocalValue] = {}
        self._copies: dict[tuple[fx.Node, str, Layout], fx.Node] = {}

    def define(self, node: fx.Node, value: LocalValue) -> None:
        """The tensor that `node` stands for: an input, an operator with one output, or a getitem."""
        mesh = self._emit.mesh
        for layout in (layout for layouts in value.shared.values() for layout in layouts):
            if len(layout) != len(mesh.shape) or not is_legal(value.shape, layout, mesh):
                raise PlanMismatchError(
                    f"{value.operator}: a shared copy of shape {list(value.shape)} cannot lie as "
                    f"{format_layout(layout)} on mesh {mesh.shape}; edit the plan or plan again"
                )
        self._values[node] = value

    def get(self, node: fx.Node, layout: Layout, phase: str, via: tuple[Layout, ...] = ()) -> fx.Node:
        """The local node of `node` in `layout` for a consumer of `phase`; `via`: layouts to pass on the way.

        Raises PlanMismatchError where a value would have to turn into a Partial.
        """
        key = (node, phase, layout)
        if key not in self._copies:
            self._copies[key] = self._view(node, layout, phase, via) if is_view(node) else self._base(*key, via)
        return self._copies[key]

    # tensors that own their data

    def _base(self, node: fx.Node, phase: str, layout: Layout, via: tuple[Layout, ...]) -> fx.Node:
        value = self._values[node]
        if layout == value.layout and not via:
            return value.node
        if phase == "backward" and value.phase == "forward":
            copy = self._copies.get((node, "forward", layout))
            if copy is not None and not via and not self._grows(value.shape, value.saved, layout):
                return copy  # saving the copy costs no more than saving what is saved in any case
        current, reached = value.layout, value.node
        for hop in (*self._hops(value, layout, phase), *via, layout):
            reached = self._move(node, value, reached, current, hop, phase)
            current = hop
        return reached

    def _hops(self, value: LocalValue, layout: Layout, phase: str) -> tuple[Layout, ...]:
        """The shared copies on the way to `layout`; none if they would lose a Partial that the consumer wants."""
        hops = value.shared.get(phase, ())
        return hops if all(is_reachable(hop, layout) for hop in hops) else ()

    def _move(
        self, node: fx.Node, value: LocalValue, reached: fx.Node, source: Layout, target: Layout, phase: str
    ) -> fx.Node:
        if source == target:
            return reached
        key = (node, phase, target)
        if key in self._copies:
            return self._copies[key]
        is_saved = value.kept and phase == "backward" and not self._grows(value.shape, value.saved, target)
        if is_saved and (node, "forward", target) in self._copies:
            return self._copies[node, "forward", target]
        if not is_reachable(source, target):
            raise PlanMismatchError(
                f"{value.operator}: its tensor lies as {format_layout(source)}, a consumer wants "
                f"{format_layout(target)}, and nothing turns into a Partial; edit the layouts of the consumer"
            )
        self._emit.at(phase, value.operator)
        self._copies[key] = self._copy(value.node.name, reached, value.shape, source, target)
        return self._copies[key]

    def _copy(self, name: str, local: fx.Node, shape: Shape, source: Layout, target: Layout) -> fx.Node:
        self._emit.redistributes = Copy(name, target, self._grows(shape, source, target))
        copy = emit_redistribution(self._emit, local, shape, source, target)
        self._emit.redistributes = None
        return copy

    def _grows(self, shape: Shape, source: Layout, target: Layout) -> bool:
        return self._emit.largest_block(shape, target) > self._emit.largest_block(shape, source)

    # views

    def _view(self, node: fx.Node, layout: Layout, phase: str, via: tuple[Layout, ...]) -> fx.Node:
        before = [self._before(node, wanted) for wanted in (*via, layout)]
        if all(wanted is not None for wanted in before):
            *hops, last = [wanted for wanted in before if wanted is not None]
            return self._look(node, self.get(viewed(node), last, phase, tuple(hops)), layout, phase)
        natural = self.natural_layout(node)
        current, reached = natural, self.get(node, natural, phase)
        for hop in (*via, layout):
            self._emit.at(phase, node.meta["operator"])
            shape = tuple(node.meta["val"].shape)
            if not is_reachable(current, hop):
                raise PlanMismatchError(
                    f"{node.meta['operator']}: its tensor lies as {format_layout(current)}, a consumer wants "
                    f"{format_layout(hop)}, and nothing turns into a Partial; edit the layouts of the consumer"
                )
            reached = self._copy(f"{node.name} (view)", reached, shape, current, hop)
            current = hop
        return reached

    def _before(self, view: fx.Node, layout: Layout) -> Layout | None:
        """The layout in front of a view if it exists there and the tensor can be brought to it."""
        before = layout_before_view(view, layout, self._emit.mesh)
        return before if before is not None and is_reachable(self.natural_layout(viewed(view)), before) else None

    def natural_layout(self, node: fx.Node) -> Layout:
        """The layout in which a tensor exists, seen through views; axes that a view cannot carry are replicated."""
        if not is_view(node):
            return self._values[node].layout
        source = self.natural_layout(viewed(node))
        after = layout_after_view(node, source, self._emit.mesh)
        axes = [axis for axis, placement in enumerate(source) if isinstance(placement, Shard)]
        while after is None:  # innermost axes first: their blocks lie inside those of the outer ones
            axis = axes.pop()
            source = (*source[:axis], Replicate(), *source[axis + 1 :])
            after = layout_after_view(node, source, self._emit.mesh)
        return after

    def _look(self, node: fx.Node, local: fx.Node, layout: Layout, phase: str) -> fx.Node:
        """The view applied to a local block."""
        shape = self._emit.local_shape(tuple(node.meta["val"].shape), layout)
        order = permutation(node)
        self._emit.at(phase, node.meta["operator"])
        if order is not None and order != tuple(range(len(order))):
            return self._emit.call(aten.permute.default, (local, list(order)), shape, local.meta["dtype"])
        if shape == local.meta["local_shape"]:
            return local
        return self._emit.call(aten.reshape.default, (local, list(shape)), shape, local.meta["dtype"])
