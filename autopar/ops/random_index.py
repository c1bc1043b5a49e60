"""Random bits by global element index: N processes draw what one process draws.

Every element of a tensor has a number, its row-major index in the GLOBAL shape. A counter hash (the finaliser of
splitmix64) of (seed, salt, number) gives its bits, so that a rank computes the bits of its own block without drawing
those of the others. `salt` tells call sites apart, `seed` (a 0-dim int64 tensor) tells steps apart.

    keep_mask((2, 3), 0.5, seed, salt, full_runs((2, 3)))[:, 1:]  ==  keep_mask(..., runs=(((0, 2),), ((1, 2),)))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Runs: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]  # per dim: (start, length) of each run of global indices

_DRAW_BITS = 24
_INCREMENT = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: the golden ratio, splitmix64's step
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def full_runs(shape: Sequence[int]) -> Runs:
    """The runs of a rank that holds the whole tensor."""
    return tuple(((0, size),) for size in shape)


def run_indices(runs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The global indices along one dim, int64, shape (sum of lengths,)."""
    pieces = [torch.arange(start, start + length, device=device) for start, length in runs]
    if not pieces:
        return torch.empty(0, dtype=torch.int64, device=device)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def global_index(shape: Sequence[int], runs: Runs, device: torch.device) -> Tensor:
    """Row-major index in the global `shape` of each element that a rank holds; int64, of the local shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, dim_runs in zip(shape, runs, strict=True):
        index = index.unsqueeze(-1) * size + run_indices(dim_runs, device)
    return index


def hash_bits(index: Tensor, seed: Tensor, salt: int) -> Tensor:
    """int64 bits of each element number, uniform over all 64-bit values. `seed`: 0-dim int64 tensor."""
    key = _mix(seed + _INCREMENT * (salt + 1) % 2**62)
    return _mix(index * _INCREMENT + key)


def keep_mask(shape: Sequence[int], p: float, seed: Tensor, salt: int, runs: Runs) -> Tensor:
    """Bool mask of the local block, True with probability 1 - p (to 2**-24); `shape` is the global one."""
    bits = hash_bits(global_index(shape, runs, seed.device), seed, salt)
    return torch.ge(_shift_right(bits, 64 - _DRAW_BITS), round(p * 2**_DRAW_BITS))


def reference_seed(device: torch.device) -> Tensor:
    """The seed of operators that run outside a compiled program: torch's own, so torch.manual_seed matters."""
    return torch.tensor(torch.initial_seed() % 2**62, dtype=torch.int64, device=device)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MULTIPLIERS[0]
    bits = (bits ^ _shift_right(bits, 27)) * _MULTIPLIERS[1]
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)  # torch shifts the sign in; the hash wants zeros
