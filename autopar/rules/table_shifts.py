"""Rules of operators that move rows along a dim: slices, padding, roll, flip.

    x[:, 1:], pad(x, [1, -1])   a rank needs the rows around its block that its part of the output shows: a halo
    flip(x, [1])                a rank's block is another one's, backwards

The output is split as the input is where it has but a few rows more or less (`windows.are_a_few`); a dim of which a
slice takes a part stays whole. Bools, which not every backend sends, stay whole along such a dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch

from autopar.rules.call import Call
from autopar.rules.windows import are_a_few


def _slice(call: Call) -> str:
    size, (dim, start) = _size_along(call), sliced_from(call)
    out = call.outputs[0]
    assert out is not None
    more = out.shape[dim] - size
    few = call.argument("step") == 1 and out.shape[dim] > 0 and are_a_few(more, size)
    return _moved(call, {dim: (more, start - more)} if few else {}, (dim,))


def sliced_from(call: Call) -> tuple[int, int]:
    """(dim, first row) of a slice."""
    rank = len(call.operands[0].shape)
    dim: int = call.argument("dim") % rank
    start, _, _ = slice(call.argument("start"), None).indices(call.operands[0].shape[dim])
    return dim, start


def _size_along(call: Call) -> int:
    shape = call.operands[0].shape
    dim: int = call.argument("dim") % len(shape)
    return shape[dim]


def _constant_pad_nd(call: Call) -> str:
    shape = call.operands[0].shape
    padded = paddings(call)
    split = {
        dim: (before + after, abs(before) + abs(after))
        for dim, (before, after) in padded.items()
        if are_a_few(before, shape[dim]) and are_a_few(after, shape[dim])
    }
    return _moved(call, split, padded, linear=not call.argument("value"))


def paddings(call: Call) -> dict[int, tuple[int, int]]:
    """Dim -> rows of padding (negative: that are cut off) in front of and behind the dims that have any."""
    pad, rank = call.argument("pad"), len(call.operands[0].shape)
    pairs = zip(pad[::2], pad[1::2], strict=True)
    return {rank - 1 - at: pair for at, pair in enumerate(pairs) if any(pair)}


def _roll(call: Call) -> str:
    """Rows that leave at one end come in at the other."""
    rolled, shape = shifts(call), call.operands[0].shape
    split = {dim: (0, min(shift, shape[dim] - shift)) for dim, shift in rolled.items()}
    return _moved(call, split, rolled or range(len(shape)))


def shifts(call: Call) -> dict[int, int]:
    """Dim -> by how many rows it is rolled, below its size; empty where the dims are rolled as one."""
    shape, dims = call.operands[0].shape, call.argument("dims")
    if not dims or 0 in shape or len({dim % len(shape) for dim in dims}) < len(dims):
        return {}
    return {dim % len(shape): by % shape[dim] for dim, by in zip(dims, call.argument("shifts"), strict=True)}


def _flip(call: Call) -> str:
    """The edges are those of two blocks: with more, a rank sends less."""
    shape = call.operands[0].shape
    dims = {dim % len(shape) for dim in call.argument("dims")}
    return _moved(call, {dim: (0, shape[dim] // 2) for dim in dims}, dims)


def _moved(
    call: Call, split: Mapping[int, tuple[int, int]], along: Collection[int], linear: bool = True
) -> str:
    """split: dim -> (rows more, rows that change ranks); along: all dims that the operator works along."""
    x = call.operands[0]
    if x.dtype == torch.bool or 0 in x.shape:
        split = {}
    inner = [f"a{i}" if i in split or i not in along else "_" for i in range(len(x.shape))]
    outer = [f"{dim}{split[i][0]:+d}" if split.get(i, (0, 0))[0] else dim for i, dim in enumerate(inner)]
    effects = "".join(
        f" ; a{i}: by moved_rows edges {rows * math.prod(x.shape) // x.shape[i] * x.dtype.itemsize}"
        for i, (_, rows) in split.items()
    )
    return f"{' '.join(inner) or '[...]'} -> {' '.join(outer) or '[...]'}{effects}{' ; linear: x' if linear else ''}"


SHIFT_RULES: Mapping[str, str | Callable[[Call], str | None]] = {
    "aten.slice.Tensor": _slice,
    "aten.constant_pad_nd": _constant_pad_nd,
    "aten.roll": _roll,
    "aten.flip": _flip,
}
