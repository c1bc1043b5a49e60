"""Layouts through the views of a graph: view, permute, unsqueeze, squeeze and full-range slices decide nothing.

    y = permute(x, [1, 0])    y wanted as (S(0), R)    -> x is needed as (S(1), R)

What a reshape does to a layout stands in `autopar.layouts.views`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.layouts.placement import Layout, Mesh, Shard
from autopar.layouts.views import Shape, reshape_layout


def viewed(node: torch.fx.Node) -> torch.fx.Node:
    """The tensor that a view looks at."""
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    return source


def permutation(node: torch.fx.Node) -> tuple[int, ...] | None:
    """Input dim of every output dim of a permute, None for views that keep the order of elements."""
    if node.target is not torch.ops.aten.permute.default:
        return None
    rank = len(node.meta["val"].shape)
    return tuple(int(dim) % rank for dim in node.args[1])  # type: ignore[arg-type, union-attr]


def layout_before_view(node: torch.fx.Node, layout: Layout, mesh: Mesh) -> Layout | None:
    """Layout that the input of view `node` must have for the output to have `layout`; None if there is none."""
    order = permutation(node)
    if order is not None:
        return _renamed(layout, dict(enumerate(order)))
    return reshape_layout(_shape(node), _shape(viewed(node)), layout, mesh.shape)


def layout_after_view(node: torch.fx.Node, layout: Layout, mesh: Mesh) -> Layout | None:
    """Layout of the output of view `node` when its input has `layout`; None if no layout says it."""
    order = permutation(node)
    if order is not None:
        return _renamed(layout, {source: dim for dim, source in enumerate(order)})
    return reshape_layout(_shape(viewed(node)), _shape(node), layout, mesh.shape)


def _shape(node: torch.fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def _renamed(layout: Layout, names: dict[int, int]) -> Layout:
    return tuple(replace(p, dim=names[p.dim]) if isinstance(p, Shard) else p for p in layout)
