"""Slices, padding, roll and flip along a split dim: rows come from the rank that holds them.

    x[:, 1:] of rows 0 .. 8 on two ranks: rank 0 has rows 0 .. 3 and makes 1 .. 4, so rank 1 lends it row 4
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx

from autopar.passes.implementations.halos import Run, Shape, extend, halo_along
from autopar.passes.implementations.local_context import LocalContext, replace_argument
from autopar.rules.call import call_of
from autopar.rules.table_shifts import paddings, shifts, sliced_from

_aten = torch.ops.aten
_Form: TypeAlias = Callable[[LocalContext, tuple[Any, ...], dict[str, Any]], fx.Node]


def _moved_rows(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    return _FORMS[context.node.target](context, args, kwargs)


def _slice(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    dim, first = sliced_from(call_of(context.node))
    return _windowed(context, args[0], _input_shape(context), dim, lambda start, length: (start + first, length))[0]


def _pad(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Along split dims the window holds the padding, along the others the operator adds it."""
    x: fx.Node = args[0]
    shape, pad = _input_shape(context), list(context.global_argument("pad"))
    value = context.global_argument("value")
    for dim, (before, _) in paddings(call_of(context.node)).items():
        if _axes(context, dim):
            x, shape = _windowed(context, x, shape, dim, _earlier(before), value)
            at = 2 * (len(shape) - 1 - dim)
            pad[at : at + 2] = 0, 0
    if not any(pad):
        return x
    return context.call_operator(*replace_argument(context.node.target, (x, *args[1:]), kwargs, "pad", pad))


def _roll(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Rows that stay on their side of the ends, and those that go around: every row is in one of the two windows."""
    x, shape, rolled = args[0], _input_shape(context), shifts(call_of(context.node))
    for dim in [dim for dim in rolled if _axes(context, dim)]:
        by, size = rolled.pop(dim), context.global_output().shape[dim]
        parts = [_windowed(context, x, shape, dim, _earlier(first))[0] for first in (by, by - size)]
        x = context.describe(context.call(_aten.add.Tensor, *parts), shape, context.global_output().dtype)
    return context.call_operator((x, list(rolled.values()), list(rolled)), {}) if any(rolled.values()) else x


def _flip(context: LocalContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    x, shape = args[0], _input_shape(context)
    for dim in {dim % len(shape) for dim in context.global_argument("dims")}:
        if _axes(context, dim):
            x, shape = _windowed(context, x, shape, dim, _mirrored(context.global_output().shape[dim]))
    return context.call_operator((x, *args[1:]), kwargs)


def _earlier(rows: int) -> Callable[[int, int], Run]:
    return lambda start, length: (start - rows, length)


def _mirrored(size: int) -> Callable[[int, int], Run]:
    return lambda start, length: (size - start - length, length)


def _windowed(
    context: LocalContext, x: fx.Node, shape: Shape, dim: int, window: Callable[[int, int], Run], value: float = 0.0
) -> tuple[fx.Node, Shape]:
    """(the rows of x along a split dim that this rank's block of the output shows, their local shape)."""
    out = context.global_output()
    held = context.plan.inputs[0], dim, context.global_argument("self").meta["val"].shape[dim]
    halo = halo_along(context, f"a{dim}", held, (context.plan.outputs[0], dim, out.shape[dim]), window)
    return extend(context, x, shape, out.dtype, halo, value)


def _axes(context: LocalContext, dim: int) -> tuple[int, ...]:
    return context.axes_of(frozenset({f"a{dim}"}))


def _input_shape(context: LocalContext) -> Shape:
    return context.input_shape(0, tuple(context.global_argument("self").meta["val"].shape))


_FORMS: dict[Any, _Form] = {
    _aten.slice.Tensor: _slice,
    _aten.constant_pad_nd.default: _pad,
    _aten.roll.default: _roll,
    _aten.flip.default: _flip,
}
IMPLEMENTATIONS = {"moved_rows": _moved_rows}
