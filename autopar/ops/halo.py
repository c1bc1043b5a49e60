"""Halos: the rows of neighbouring blocks that an operator with a window needs beside its own.

A dim of 8 rows in blocks [0, 4) and [4, 8), a window of 3 rows with one row of padding:
    rank 0 sends row 3 and gets row 4     extended: fill, 0, 1, 2, 3, 4        rows -1 .. 4
    rank 1 sends row 4 and gets row 3     extended: 3, 4, 5, 6, 7, fill        rows 3 .. 8
The operator then runs without padding. `folded` is the way back: gradients of borrowed rows return to their owners.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Run = tuple[int, int]
"""(start, length) along one dim."""


def edges(x: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """The rows of `runs` along `dim`, one run after the other, with that dim in front."""
    rows = x.movedim(dim, 0)
    return torch.cat([rows.narrow(0, start, length) for start, length in runs]).contiguous()


def extended(
    x: Tensor, borrowed: Tensor | None, dim: int, num_before: int, own: Run, fill: Run, value: float
) -> Tensor:
    """Fill, borrowed rows, own rows, borrowed rows, fill, along `dim`.

    borrowed: as `edges` gives them; the first `num_before` come before the own rows (`own`, a run of x). fill: number
    of rows with `value` at both ends.
    """
    rows = x.narrow(dim, own[0], own[1])
    parts = [_filled(rows, dim, fill[0], value), rows, _filled(rows, dim, fill[1], value)]
    if borrowed is not None:
        moved = borrowed.movedim(0, dim)
        num_after = moved.shape[dim] - num_before
        parts.insert(2, moved.narrow(dim, num_before, num_after))
        parts.insert(1, moved.narrow(dim, 0, num_before))
    return torch.cat(parts, dim)


def folded(
    gradient: Tensor, returned: Tensor | None, dim: int, own: Run, at: int, size: int, runs: Sequence[Run]
) -> Tensor:
    """Gradient of a block of `size` rows from that of its extension: own rows plus what the borrowers return.

    own: the run of `gradient` that belongs to the own rows, which begin at row `at` of the block. returned: as `edges`
    gives them; its pieces belong to the rows `runs` of the block, one after the other.
    """
    shape = list(gradient.shape)
    shape[dim] = size
    result = gradient.new_zeros(shape)
    result.narrow(dim, at, own[1]).add_(gradient.narrow(dim, own[0], own[1]))
    if returned is not None:
        pieces = torch.split(returned.movedim(0, dim), [length for _, length in runs], dim)
        for piece, (start, length) in zip(pieces, runs, strict=True):
            result.narrow(dim, start, length).add_(piece)
    return result


def moved_positions(positions: Tensor, size: Sequence[int], start: Sequence[int], new_size: Sequence[int]) -> Tensor:
    """Positions in a grid of `size`, flattened row-major, as positions in a grid of `new_size` in which the first
    grid begins at `start` (negative: the new grid is the inner one)."""
    rest, moved, stride = positions, torch.zeros_like(positions), 1
    for extent, first, new_extent in zip(reversed(size), reversed(start), reversed(new_size), strict=True):
        moved = moved + (rest % extent + first) * stride
        rest, stride = rest // extent, stride * new_extent
    return moved


def scattered(gradient: Tensor, positions: Tensor, size: Sequence[int]) -> Tensor:
    """Zeros of spatial `size` with every value of `gradient` added at its position (flattened over `size`)."""
    num_dims = len(size)
    flat = gradient.flatten(-num_dims)
    result = gradient.new_zeros((*gradient.shape[:-num_dims], *size)).flatten(-num_dims)
    return result.scatter_add(-1, positions.flatten(-num_dims), flat).reshape(gradient.shape[:-num_dims] + tuple(size))


def packed(*values: Tensor | None) -> tuple[Tensor | None, ...]:
    """Several values as the outputs of one call."""
    return values


def _filled(like: Tensor, dim: int, count: int, value: float) -> Tensor:
    shape = list(like.shape)
    shape[dim] = count
    return like.new_full(shape, value)
