"""Local halves of a redistribution: cut the dims of a block into one piece per rank of a group, or join such pieces.

A cut `(dim, position, pieces)` sees `dim` as (position, pieces, rest) and hands out the middle factor. Several cuts
(one per mesh axis, in mesh order) make one group; dim 0 of the buffer of a collective counts its ranks row-major.

    pieces_first(x[4, 6], [(1, 1, 2)], (4, 6))   -> [8, 3]: columns 0..2 over columns 3..5
    pieces_joined(y[8, 3], [(1, 1, 2)], (4, 6), (4, 6))   -> x again
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Cut = tuple[int, int, int]


def padded(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x`, contiguous, grown with zeros at the end of each dim to `shape`."""
    if tuple(x.shape) == tuple(shape):
        return x.contiguous()
    grown = x.new_zeros(tuple(shape))
    grown[tuple(slice(size) for size in x.shape)] = x
    return grown


def trimmed(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The first `shape` elements along each dim, contiguous."""
    if tuple(x.shape) == tuple(shape):
        return x
    return x[tuple(slice(size) for size in shape)].contiguous()


def piece(x: Tensor, cuts: Sequence[Cut], indices: Sequence[int]) -> Tensor:
    """The piece that stands at `indices`, one per cut; the cuts divide evenly. Same number of dims, contiguous."""
    factors, places = _factored(x.shape, cuts)
    seen = x.reshape(factors)
    for place, index in zip(places, indices, strict=True):
        seen = seen.narrow(place, index, 1)
    return seen.reshape(_block_shape(x.shape, cuts)).contiguous()


def region(x: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """`lengths` indices from `starts` along every dim, contiguous."""
    ranges = zip(starts, lengths, strict=True)
    return x[tuple(slice(start, start + length) for start, length in ranges)].contiguous()


def pieces_first(x: Tensor, cuts: Sequence[Cut], padded_shape: Sequence[int]) -> Tensor:
    """Pad `x`, then lay its pieces one behind the other along dim 0: (ranks * block[0], *block[1:]), contiguous."""
    factors, places = _factored(padded_shape, cuts)
    seen = padded(x, padded_shape).reshape(factors)
    rest = [place for place in range(len(factors)) if place not in places]
    block_shape = _block_shape(padded_shape, cuts)
    ranks = math.prod(pieces for _, _, pieces in cuts)
    return seen.permute(*places, *rest).reshape(ranks * block_shape[0], *block_shape[1:]).contiguous()


def pieces_joined(y: Tensor, cuts: Sequence[Cut], padded_shape: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Inverse of `pieces_first`: put every piece where it belongs and trim the padding, contiguous."""
    factors, places = _factored(padded_shape, cuts)
    rest = [place for place in range(len(factors)) if place not in places]
    order = [*places, *rest]
    seen = y.reshape([factors[place] for place in order])
    back = [order.index(place) for place in range(len(order))]
    return trimmed(seen.permute(back).reshape(tuple(padded_shape)).contiguous(), shape)


def in_zigzag(x: Tensor, dim: int, position: int, pieces: int) -> Tensor:
    """`dim` seen as (position, pieces, rest), the middle factor reversed where the first is odd, contiguous: from the
    order of blocks in a tensor to that in which zigzag deals them out, and back."""
    size = x.shape[dim] // (position * pieces)
    seen = x.reshape(*x.shape[:dim], position // 2, 2, pieces, size, *x.shape[dim + 1 :])
    halves = [seen.select(dim + 1, 0), seen.select(dim + 1, 1).flip(dim + 1)]
    return torch.stack(halves, dim + 1).reshape(x.shape)


def strips(x: Tensor, dim: int, runs: Sequence[tuple[int, int]]) -> Tensor:
    """The rows (start, length) of a dim one behind the other, contiguous."""
    return torch.cat([x.narrow(dim, start, length) for start, length in runs], dim)


def keeps_order(shape: Sequence[int], cuts: Sequence[Cut]) -> bool:
    """Whether laying the pieces of a contiguous block one behind the other moves nothing: they lie like that."""
    factors, places = _factored(shape, cuts)
    order = [*places, *(place for place in range(len(factors)) if place not in places)]
    moved = [place for place in order if factors[place] > 1]
    return moved == sorted(moved)


def _factored(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[list[int], list[int]]:
    """The dims split at every cut, and where the factor of each cut stands."""
    factors: list[int] = []
    places = [0] * len(cuts)
    for dim, size in enumerate(shape):
        done = 1
        for position, index in sorted((cut[1], index) for index, cut in enumerate(cuts) if cut[0] == dim):
            assert position % done == 0, f"cut {cuts[index]} overlaps another one of {cuts}"
            factors.append(position // done)
            places[index] = len(factors)
            factors.append(cuts[index][2])
            done = position * cuts[index][2]
        assert size % done == 0, f"cuts {cuts} do not divide the shape {tuple(shape)}"
        factors.append(size // done)
    return factors, places


def _block_shape(shape: Sequence[int], cuts: Sequence[Cut]) -> list[int]:
    sizes = list(shape)
    for dim, _, pieces in cuts:
        sizes[dim] //= pieces
    return sizes


__all__ = [
    "Cut", "in_zigzag", "padded", "piece", "pieces_first", "pieces_joined", "region", "strips", "trimmed"
]  # fmt: skip


def added_once(x: Tensor, first: bool) -> Tensor:
    """What a rank adds so that the sum over the ranks holds `x` once: `x` on the first, zeros on the others.

    Every rank reads `x`: a rank that did not would drop the collectives that bring it, and the others would wait.
    """
    return x if first else torch.zeros_like(x)
