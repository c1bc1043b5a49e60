"""Random factories: every distribution of torch is made of these four, drawn by global element index.

    rand(4, 6)        -->   uniform([4, 6], float32, salt)
    bernoulli(p)      -->   uniform(p.shape, ...) < p

Capture writes them (`capture/random_draws.py`); each call site has its own `salt`. Lowering calls the functions
`*_by_index` with the step's seed and the runs of global indices that the rank holds. Outside a compiled program the
operators draw from torch's initial seed. Values come from 24 bits in fp32 and narrower, 52 in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ops.random_index import WORD_BITS, Runs, full_runs, random_words, reference_seed

SITE_BIT = 1 << 31  # call sites of dropout and attention are counted apart; theirs lack the highest bit of the word
_MANTISSA_BITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_WIDE_BITS = 52


def uniform_by_index(dtype: torch.dtype, salt: int, seed: Tensor, runs: Runs, shape: Sequence[int]) -> Tensor:
    """Values in [0, 1), multiples of 2**-bits of the dtype, of the local block `runs` of global `shape`."""
    bits = _MANTISSA_BITS.get(dtype)
    if bits is None:
        return _wide_bits(salt, seed, runs, shape).to(dtype).mul_(2.0**-_WIDE_BITS)
    words = random_words(shape, seed, salt | SITE_BIT, runs)
    return (words >> (WORD_BITS - bits)).to(dtype).mul_(2.0**-bits)


def normal_by_index(dtype: torch.dtype, salt: int, seed: Tensor, runs: Runs, shape: Sequence[int]) -> Tensor:
    """Standard normal values by Box and Muller, computed in fp64."""
    radius = _open_unit(salt, seed, runs, shape, 0).log_().mul_(-2.0).sqrt_()
    return radius.mul_(_open_unit(salt, seed, runs, shape, 2).mul_(2.0 * math.pi).cos_()).to(dtype)


def exponential_by_index(dtype: torch.dtype, salt: int, seed: Tensor, runs: Runs, shape: Sequence[int]) -> Tensor:
    """Exponential values of rate 1; never 0, so that their logarithm is finite."""
    return _open_unit(salt, seed, runs, shape, 0).log_().neg_().to(dtype)


def integers_by_index(
    low: int, high: int, dtype: torch.dtype, salt: int, seed: Tensor, runs: Runs, shape: Sequence[int]
) -> Tensor:
    """Integers in [low, high); the bias is below (high - low) * 2**-32, for wider ranges below 2**-9."""
    span = high - low
    if span <= 1 << (WORD_BITS - 1):
        return (random_words(shape, seed, salt | SITE_BIT, runs).mul_(span) >> WORD_BITS).add_(low).to(dtype)
    first, second = (random_words(shape, seed, salt | SITE_BIT, runs, draw) for draw in (0, 1))
    return ((first << (WORD_BITS - 2)) + (second >> 1)).remainder_(span).add_(low).to(dtype)


def _open_unit(salt: int, seed: Tensor, runs: Runs, shape: Sequence[int], draw: int) -> Tensor:
    """fp64 values strictly between 0 and 1."""
    return _wide_bits(salt, seed, runs, shape, draw).to(torch.float64).add_(0.5).mul_(2.0**-_WIDE_BITS)


def _wide_bits(salt: int, seed: Tensor, runs: Runs, shape: Sequence[int], draw: int = 0) -> Tensor:
    """52 bits of two words."""
    high, low = (random_words(shape, seed, salt | SITE_BIT, runs, draw + part) for part in (0, 1))
    return (high << (_WIDE_BITS - WORD_BITS)) + (low >> (2 * WORD_BITS - _WIDE_BITS))


@torch.library.custom_op(
    "autopar::uniform", mutates_args=(), schema="(SymInt[] size, ScalarType dtype, int salt) -> Tensor"
)
def uniform(size: Sequence[int], dtype: torch.dtype, salt: int) -> Tensor:
    """Uniform values in [0, 1)."""
    return uniform_by_index(dtype, salt, reference_seed(torch.device("cpu")), full_runs(size), size)


@torch.library.custom_op(
    "autopar::normal", mutates_args=(), schema="(SymInt[] size, ScalarType dtype, int salt) -> Tensor"
)
def normal(size: Sequence[int], dtype: torch.dtype, salt: int) -> Tensor:
    """Standard normal values."""
    return normal_by_index(dtype, salt, reference_seed(torch.device("cpu")), full_runs(size), size)


@torch.library.custom_op(
    "autopar::exponential", mutates_args=(), schema="(SymInt[] size, ScalarType dtype, int salt) -> Tensor"
)
def exponential(size: Sequence[int], dtype: torch.dtype, salt: int) -> Tensor:
    """Exponential values of rate 1."""
    return exponential_by_index(dtype, salt, reference_seed(torch.device("cpu")), full_runs(size), size)


@torch.library.custom_op(
    "autopar::integers",
    mutates_args=(),
    schema="(SymInt[] size, int low, int high, ScalarType dtype, int salt) -> Tensor",
)
def integers(size: Sequence[int], low: int, high: int, dtype: torch.dtype, salt: int) -> Tensor:
    """Integers in [low, high)."""
    return integers_by_index(low, high, dtype, salt, reference_seed(torch.device("cpu")), full_runs(size), size)


@uniform.register_fake
@normal.register_fake
@exponential.register_fake
def _(size: Sequence[int], dtype: torch.dtype, salt: int) -> Tensor:
    return torch.empty(size, dtype=dtype)


@integers.register_fake
def _(size: Sequence[int], low: int, high: int, dtype: torch.dtype, salt: int) -> Tensor:
    return torch.empty(size, dtype=dtype)
