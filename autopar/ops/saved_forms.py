"""Saved values in less room: rounded to 8, 4 or 2 bits, or as one bit per value.

    kept = round_groups(x, 4, seed, salt, shape, runs)      4 bits a value, and 8 bytes per group of 256
    x~   = unround_groups(kept, 4, x.shape, x.dtype)        E[x~] = x
    bits = pack_bits(relu(x))                               which values are above 0, 8 to a byte
    unpack_bits(bits, x.shape, x.dtype)                     1 where they are, 0 elsewhere

Rounding is that of ActNN and GACT (Chen et al., 2021; Liu et al., 2022): of each group, 256 values that lie behind one
another, the least value and a step are kept in fp32, and a value between two steps goes to either of them by chance, so
that its mean is exact. Chance is drawn by global element index (`random_index.py`). Groups are those of a rank's block:
they are the same ones on any number of ranks where these cut the tensor into runs of multiples of 256 values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ops.random_index import Runs, random_words

GROUP = 256
"""Values that share a least value and a step."""
RANGE_BYTES = 8
"""Of both."""
FRACTION_BITS = 24
"""Of a word, that decide to which side a value is rounded: as many as fp32 holds exactly."""


def rounded_bytes(count: int, bits: int) -> int:
    """What `round_groups` makes of `count` values."""
    return _groups(count) * (GROUP * bits // 8 + RANGE_BYTES)


def packed_bytes(count: int) -> int:
    """What `pack_bits` makes of `count` values."""
    return -(-count // 8)


def _groups(count: int) -> int:
    return -(-count // GROUP)


def flat_runs(runs: Runs) -> list[int]:
    """Runs as an operator takes them: of each dim how many there are, then their starts and lengths."""
    return [number for dim in runs for number in (len(dim), *(part for run in dim for part in run))]


def nested_runs(numbers: Sequence[int]) -> Runs:
    """What `flat_runs` made flat."""
    found, at = list[tuple[tuple[int, int], ...]](), 0
    while at < len(numbers):
        end = at + 1 + 2 * numbers[at]
        found.append(tuple(zip(numbers[at + 1 : end : 2], numbers[at + 2 : end : 2], strict=True)))
        at = end
    return tuple(found)


def rounded_by_index(x: Tensor, bits: int, seed: Tensor, salt: int, runs: Runs, shape: Sequence[int]) -> Tensor:
    """`round_groups` as lowered programs call it; runs: of the local block `x` of a tensor of global `shape`."""
    kept: Tensor = round_groups(x, bits, seed, salt, list(shape), flat_runs(runs))
    return kept


def round_groups_reference(
    x: Tensor, bits: int, seed: Tensor, salt: int, shape: Sequence[int], runs: Sequence[int]
) -> Tensor:
    """(rounded_bytes,) uint8: codes of all groups, then least value and step of each."""
    count, groups = x.numel(), _groups(x.numel())
    if not count:
        return x.new_empty(0, dtype=torch.uint8)
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = _padded(x.reshape(-1).to(precise), groups * GROUP).reshape(groups, GROUP)
    words = random_words(shape, seed, salt, nested_runs(runs)).reshape(-1)
    chance = _padded((words >> 32 - FRACTION_BITS).to(precise) / 2**FRACTION_BITS, groups * GROUP)
    levels = 2**bits - 1
    low, high = values.amin(1), values.amax(1)
    ranges = torch.stack((low, (high - low) / levels), 1).to(torch.float32)
    least, step = ranges.to(precise).unsqueeze(-1).unbind(1)
    inverse = torch.where(step > 0, 1 / step, 0.0)
    codes = ((values - least) * inverse + chance.reshape(groups, GROUP)).floor().clamp(0, levels).to(torch.uint8)
    codes.view(-1)[count:] = 0
    return torch.cat((_joined(codes, bits).reshape(-1), ranges.reshape(-1).view(torch.uint8)))


def _padded(values: Tensor, size: int) -> Tensor:
    """Up to `size` by repeating the last value."""
    return torch.cat((values, values[-1:].expand(size - len(values)))) if len(values) < size else values


def _joined(codes: Tensor, bits: int) -> Tensor:
    """8 / bits neighbours in a byte, the first one lowest."""
    each = 8 // bits
    parts = codes.reshape(len(codes), -1, each)
    found = parts[..., 0].clone()
    for place in range(1, each):
        found |= parts[..., place] << place * bits
    return found


round_groups = torch.library.custom_op(
    "autopar::round_groups",
    round_groups_reference,
    mutates_args=(),
    schema="(Tensor x, int bits, Tensor seed, int salt, int[] shape, int[] runs) -> Tensor",
)


@round_groups.register_fake
def _(x: Tensor, bits: int, seed: Tensor, salt: int, shape: Sequence[int], runs: Sequence[int]) -> Tensor:
    return x.new_empty(rounded_bytes(x.numel(), bits), dtype=torch.uint8)


def unround_groups_reference(kept: Tensor, bits: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values of `round_groups`, contiguous, of local shape `size`."""
    count = math.prod(size)
    groups, precise = _groups(count), torch.float64 if dtype == torch.float64 else torch.float32
    ranges = kept[groups * GROUP * bits // 8 :].clone().view(torch.float32).reshape(groups, 2).to(precise)
    codes = kept[: groups * GROUP * bits // 8]
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=kept.device)
    parts = (codes.unsqueeze(-1) >> places) & (2**bits - 1)
    values = ranges[:, :1] + parts.reshape(groups, GROUP).to(precise) * ranges[:, 1:]
    found: Tensor = values.to(dtype).reshape(-1)[:count].reshape(size).clone()
    return found


unround_groups = torch.library.custom_op(
    "autopar::unround_groups",
    unround_groups_reference,
    mutates_args=(),
    schema="(Tensor kept, int bits, int[] size, ScalarType dtype) -> Tensor",
)


@unround_groups.register_fake
def _(kept: Tensor, bits: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return kept.new_empty(size, dtype=dtype)


def pack_bits_reference(x: Tensor) -> Tensor:
    """(packed_bytes,) uint8: bools as they are, of numbers whether they are above 0 (NaN, too, as ReLU's backward)."""
    flags = (x if x.dtype == torch.bool else ~(x <= 0)).reshape(-1)
    full = torch.nn.functional.pad(flags, (0, -len(flags) % 8)).reshape(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=x.device)
    return (full * weights).sum(1, dtype=torch.uint8)


pack_bits = torch.library.custom_op(
    "autopar::pack_bits", pack_bits_reference, mutates_args=(), schema="(Tensor x) -> Tensor"
)


@pack_bits.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(packed_bytes(x.numel()), dtype=torch.uint8)


def unpack_bits_reference(kept: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """0 or 1, or bools, of local shape `size`."""
    places = torch.arange(8, dtype=torch.uint8, device=kept.device)
    flags = (kept.unsqueeze(-1) >> places) & 1
    return flags.reshape(-1)[: math.prod(size)].reshape(size).to(dtype)


unpack_bits = torch.library.custom_op(
    "autopar::unpack_bits",
    unpack_bits_reference,
    mutates_args=(),
    schema="(Tensor kept, int[] size, ScalarType dtype) -> Tensor",
)


@unpack_bits.register_fake
def _(kept: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return kept.new_empty(size, dtype=dtype)
