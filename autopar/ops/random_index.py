"""Random words by global element index: N processes draw what one process draws.

Every element of a tensor has a number, its row-major index in the GLOBAL shape. Word `number % 4` of Philox-4x32-10
at counter (number // 4, salt, draw) under the key `seed` belongs to it, so that a rank computes the words of its own
block without drawing those of the others. `salt` tells call sites apart, `draw` the words that one element of one
call site needs, and `seed` (a 0-dim int64 tensor) tells steps apart.

    keep_mask((2, 3), 0.5, seed, salt, full_runs((2, 3)))[:, 1:]  ==  keep_mask(..., runs=(((0, 2),), ((1, 2),)))

The elements of a block lie in rows, runs of neighbouring numbers; one counter serves the four neighbours that share
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from autopar.ops.philox import LANES, philox

Runs: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]  # per dim: (start, length) of each run of global indices

WORD_BITS = 32


def full_runs(shape: Sequence[int]) -> Runs:
    """The runs of a rank that holds the whole tensor."""
    return tuple(((0, size),) for size in shape)


def run_indices(runs: Sequence[tuple[int, int]], device: torch.device, step: int = 1) -> Tensor:
    """`step` times the global indices along one dim, int64, shape (sum of lengths,)."""
    pieces = [torch.arange(start * step, (start + length) * step, step, device=device) for start, length in runs]
    if not pieces:
        return torch.empty(0, dtype=torch.int64, device=device)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def global_index(shape: Sequence[int], runs: Runs, device: torch.device, step: int = 1) -> Tensor:
    """`step` times the row-major index in the global `shape` of each element that a rank holds; int64, of the local
    shape."""
    index: Tensor | None = None
    for dim, dim_runs in enumerate(runs):
        part = run_indices(dim_runs, device, max(1, step * math.prod(shape[dim + 1 :])))
        index = part if index is None else index.unsqueeze(-1) + part
    return torch.zeros((), dtype=torch.int64, device=device) if index is None else index


def merge_dims(shape: Sequence[int], runs: Runs) -> tuple[tuple[int, ...], Runs]:
    """The same numbers in the same order with fewer dims: a dim held whole goes into the dim before it.

    shape (6, 4, 5), runs (((2, 3),), whole, whole)   -->   shape (120,), runs (((40, 60),),)
    """
    sizes: list[int] = []
    merged: list[tuple[tuple[int, int], ...]] = []
    for size, dim_runs in zip(shape, runs, strict=True):
        if sizes and dim_runs == ((0, size),):
            sizes[-1] *= size
            merged[-1] = tuple((start * size, length * size) for start, length in merged[-1])
        else:
            sizes.append(size)
            merged.append(dim_runs)
    return tuple(sizes), tuple(merged)


def random_words(shape: Sequence[int], seed: Tensor, salt: int, runs: Runs, draw: int = 0) -> Tensor:
    """int64 values, uniform in [0, 2**32), of the local block of a tensor of global `shape`."""
    local = [sum(length for _, length in dim_runs) for dim_runs in runs]
    if 0 in local:
        return torch.empty(local, dtype=torch.int64, device=seed.device)
    sizes, merged = merge_dims(shape or (1,), runs or (((0, 1),),))
    origins = global_index(sizes[:-1], merged[:-1], seed.device, sizes[-1]).reshape(-1)
    pieces = [row_words(origins + start, length, seed, salt, draw) for start, length in merged[-1]]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).reshape(local)


def as_rows(shape: Sequence[int], runs: Runs) -> tuple[int, int, int] | None:
    """(first number, numbers from row to row, rows) of a block that is one row or a grid of equal rows; else None."""
    sizes, merged = merge_dims(shape or (1,), runs or (((0, 1),),))
    if len(merged) > 2 or any(len(dim_runs) != 1 for dim_runs in merged):
        return None
    if len(merged) == 1:
        return merged[0][0][0], sizes[0], 1
    ((row, rows),), ((column, _),) = merged
    return row * sizes[1] + column, sizes[1], rows


def row_words(starts: Tensor, length: int, seed: Tensor, salt: int, draw: int = 0) -> Tensor:
    """Words of the numbers starts[i] ... starts[i] + length - 1, shape (len(starts), length)."""
    first = starts // LANES
    count = (length + 2 * (LANES - 1)) // LANES  # counters that a row touches at most, wherever it starts
    counters = first.unsqueeze(1) + torch.arange(count, device=starts.device)
    words = philox(counters.reshape(-1), salt, draw, seed).reshape(len(starts), count * LANES)
    lanes = starts - first * LANES
    if len(starts) == 1 and starts.device.type == "cpu":
        return words.narrow(1, int(lanes), length)
    return words.gather(1, lanes.unsqueeze(1) + torch.arange(length, device=starts.device))


def keep_mask(shape: Sequence[int], p: float, seed: Tensor, salt: int, runs: Runs) -> Tensor:
    """Bool mask of the local block, True with probability 1 - p (to 2**-32); `shape` is the global one."""
    return random_words(shape, seed, salt, runs) >= drop_threshold(p)


def drop_threshold(p: float) -> int:
    """Words below it drop their element."""
    return round(p * (1 << WORD_BITS))


def reference_seed(device: torch.device) -> Tensor:
    """The seed of operators that run outside a compiled program: torch's own, so torch.manual_seed matters. The device
    writes it: a copy of a number from the host would wait for all that the device has to do."""
    return torch.full((), torch.initial_seed() % 2**62, dtype=torch.int64, device=device)
