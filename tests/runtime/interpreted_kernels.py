"""Every Triton kernel in Triton's interpreter beside its torch reference (`tests.runtime.interpreted` runs it).

The interpreter rounds fp32 to bf16 by cutting, so bf16 is compared to one unit in its last place; rounding up to the
next power of two it loses the carry in float8 (Triton 3.9), so these cases hold what float8 has exactly;
products of bf16 it multiplies as the integers of their bits, so attention and grouped products run in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ops import linear_cross_entropy
from autopar.ops.cross_entropy import cross_entropy_rows_reference
from autopar.ops.gated import ACTIVATIONS
from autopar.ops.indexed_attention import indexed_attention_reference
from autopar.ops.linear_cross_entropy import linear_cross_entropy_reference
from autopar.ops.norms import add_layer_norm_reference, rms_norm_reference
from autopar.ops.packing import pack_reference
from autopar.ops.random_index import Runs
from autopar.ops.saved_forms import flat_runs, pack_bits_reference, round_groups_reference
from autopar.runtime.kernels import triton_merging as triton_merging
from autopar.runtime.kernels import triton_norms as triton_norms
from autopar.runtime.kernels import triton_rope as triton_rope
from autopar.runtime.kernels.registry import KERNELS

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
CUTS = [
    ((4, 6), 1, 1, 2, 6),
    ((4, 6), 1, 1, 4, 8),
    ((6, 3), 0, 1, 3, 6),
    ((2, 12, 5), 1, 3, 2, 12),
    ((5, 7), 0, 1, 2, 6),
    ((5, 700), 1, 1, 2, 700),
]
"""(shape, dim, position, pieces, padded size): in the middle, padded, along dim 0, at a position, padded on dim 0, in
several programs."""


def cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(operator, arguments) with rows that are and that are no power of two."""
    for rows, columns in ((3, 64), (7, 5), (13, 100)):
        yield from norm_cases(rows, columns, dtype)
        gate, up, grad = (torch.randn(rows, columns).to(dtype) for _ in range(3))
        for activation in ACTIVATIONS:
            yield "gated", (gate, up, activation)
            yield "gated_backward", (grad, gate, up, activation)
    for width in (64, 100, 4100):
        yield from cross_entropy_cases(width, dtype)
    yield from linear_cross_entropy_cases(dtype)
    yield from head_norm_cases(dtype)
    yield from rope_cases(dtype)
    yield from merging_cases(dtype)
    yield from form_cases(dtype)
    for rows, columns in ((3, 64), (20, 5), (17, 300)):
        x = (1.75 * torch.randn(rows, columns).sign() * 2.0 ** -torch.randint(8, (rows, columns))).to(dtype)
        x[1] = 0
        for operand in (x, x.t()):
            yield "quantised_rows", (operand,)
            yield "quantised_tensor", (operand,)
    multiplied = torch.float16 if dtype == torch.bfloat16 else dtype
    yield from grouped_cases(multiplied)
    yield from attention_cases(multiplied)
    for shape, dim, position, pieces, padded in CUTS:
        x = torch.randn(shape).to(dtype)
        yield "pack", (x, dim, position, pieces, padded)
        packed = pack_reference(x, dim, position, pieces, padded)
        yield "unpack", (packed, dim, position, pieces, padded, shape[dim])


def form_cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Blocks in rows that begin at multiples of 4 and not, of one group, of part of one and of several programs."""
    seed = torch.tensor(-(1 << 40) - 7)
    blocks: list[tuple[tuple[int, ...], Runs]] = [
        ((3, 100), (((0, 3),), ((0, 100),))),
        ((6, 300), (((2, 3),), ((100, 200),))),
        ((5, 37), (((1, 4),), ((3, 31),))),
        ((9, 700), (((0, 9),), ((0, 700),))),
    ]
    for bits in (8, 4, 2):
        for shape, runs in blocks:
            size = [sum(length for _, length in dim) for dim in runs]
            x = torch.randn(size).to(dtype)
            x[0] = 0.5
            rounded = (x, bits, seed, (1 << 31) + 5, list(shape), flat_runs(runs))
            yield "round_groups", rounded
            yield "unround_groups", (round_groups_reference(*rounded), bits, size, dtype)
    for x in (torch.relu(torch.randn(7, 13)).to(dtype), torch.rand(3, 1000) < 0.5):
        yield "pack_bits", (x,)
        yield "unpack_bits", (pack_bits_reference(x), list(x.shape), x.dtype)


def norm_cases(rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Norms forward, and backward with and without a further gradient."""
    x, residual, grad, added = (torch.randn(rows, columns).to(dtype) * 3 + 1 for _ in range(4))
    weight, bias = (torch.randn(columns).to(dtype) for _ in range(2))
    _, rstd = rms_norm_reference(x, weight, 1e-6)
    yield "rms_norm", (x, weight, 1e-6)
    yield "add_rms_norm", (x, residual, weight, 1e-6)
    yield "rms_norm_backward", (grad, x, weight, rstd, None)
    yield "rms_norm_backward", (grad, x, weight, rstd, added)
    _, total, mean, deviation = add_layer_norm_reference(x, residual, weight, bias, 1e-5)
    yield "layer_norm", (x, weight, bias, 1e-5)
    yield "add_layer_norm", (x, residual, weight, bias, 1e-5)
    yield "layer_norm_backward", (grad, total, weight, mean, deviation, None)
    yield "layer_norm_backward", (grad, total, weight, mean, deviation, added)


def head_norm_cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Norms of heads, which lie behind those of the token before: (B, H, S, D) of a (B, S, H, D) in memory."""
    x, grad = (torch.randn(2, 5, 3, 12).to(dtype).transpose(1, 2) for _ in range(2))
    weight, bias = (torch.randn(12).to(dtype) for _ in range(2))
    _, rstd = rms_norm_reference(x, weight, 1e-6)
    yield "rms_norm", (x, weight, 1e-6)
    yield "rms_norm_backward", (grad.contiguous(), x, weight, rstd, grad)
    yield "layer_norm", (x, weight, bias, 1e-5)


def cross_entropy_cases(width: int, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A block that begins at 7: targets inside, before, behind and ignored; a masked row."""
    logits = torch.randn(5, width).to(dtype) * 4
    logits[4, : width // 2] = float("-inf")
    target = torch.tensor([7, 3, width + 6, width + 7, -100])
    maximum, total, _ = cross_entropy_rows_reference(logits, target, 7)
    yield "cross_entropy", (logits, target - 7)
    yield "cross_entropy_rows", (logits, target, 7)
    scale = torch.tensor([0.5, 1.0, 2.0, 0.25, 0.0])
    yield "cross_entropy_backward", (logits, target, maximum, total.log(), scale, 7)
    part = functional.pad(logits, (0, 3), value=9.0)[:, :width]  # of longer rows, whose further columns nobody counts
    yield "cross_entropy", (part, target - 7)
    yield "cross_entropy_rows", (part, target, 7)
    yield "cross_entropy_backward", (part, target, maximum, total.log(), scale, 7, width + 5)


def linear_cross_entropy_cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Three chunks of up to 128 rows, the last of 14, over a block that begins at 7."""
    hidden, weight = torch.randn(270, 8).to(dtype), torch.randn(100, 8).to(dtype)
    target = torch.randint(120, (270,)).masked_fill(torch.rand(270) < 0.1, -100)
    maximum, total, _ = linear_cross_entropy_reference(hidden, weight, target, 7)
    yield "linear_cross_entropy", (hidden, weight, target, 7)
    scale = torch.rand(270).masked_fill(target < 0, 0)
    yield "linear_cross_entropy_backward", (hidden, weight, target, maximum, total.log(), scale, 7)


def rope_cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Heads in memory by sequence and by head, of which a program takes all or some; angles of all or of each batch."""
    for shape, batch, interleaved in (((2, 5, 3, 6), 1, False), ((2, 2, 4, 16), 2, True), ((1, 9, 2, 1000), 1, False)):
        x = torch.randn(shape).to(dtype).transpose(1, 2)
        cos, sin = (torch.randn(batch, shape[1], shape[3]).to(dtype) for _ in range(2))
        for operand in (x, x.contiguous()):
            yield "rope", (operand, cos, sin, interleaved)
            yield "rope_backward", (operand, cos, sin, interleaved)


def merging_cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Rows by head and by sequence, totals as wide as their block and wider; rows that see one block or none."""
    for shape, wide in (((2, 3, 5, 6), False), ((1, 2, 40, 64), True), ((2, 1, 3, 100), False)):
        out, other = torch.randn(shape), torch.randn(shape).to(dtype)
        sums, others = (torch.randn(shape[:-1]) * 3 for _ in range(2))
        sums[0, 0, :2] = others[0, 0, 1:3] = -torch.inf
        out[0, 0, :2] = other[0, 0, 1:3] = 0
        given = out if wide else out.to(dtype)
        yield "merge_blocks", (given, sums, other, others)
        yield "merge_blocks", (given.transpose(1, 2).contiguous().transpose(1, 2), sums, other, others)


def grouped_cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Runs of several tiles, of just one and of none, with and without rows behind them, matrices of both strides."""
    for counts, length, inner, columns in (([3, 0, 70, 5], 80, 20, 150), ([0, 0], 3, 16, 8), ([64, 0, 2], 66, 70, 5)):
        rows, grad = torch.randn(length, inner).to(dtype), torch.randn(length, columns).to(dtype)
        matrices, told = torch.randn(len(counts), inner, columns).to(dtype), torch.tensor(counts)
        yield "grouped_product", (rows, matrices, told)
        yield "grouped_product", (grad, matrices.transpose(1, 2), told)
        yield "grouped_outer", (rows, grad, told)


def attention_cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Masks over some batch dims, rows that see nothing, shared heads of keys, blocks with their own indices, dropout
    with counters of four and of one element, windows."""
    salt, seed = 3, torch.tensor(71)
    for queries, keys, width, mask, is_causal, dropout_p, first, window in (
        (5, 7, 8, None, True, 0.0, 2, None),
        (5, 12, 8, None, True, 0.3, 4, None),
        (40, 44, 20, (1, 3, 4, 40, 44), False, 0.2, 0, None),
        (5, 7, 8, (2, 1, 4, 5, 7), True, 0.3, 1, None),
        (5, 7, 8, (2, 3, 1, 1, 7), False, 0.0, 0, None),
        (40, 44, 8, None, True, 0.0, 2, 9),
        (5, 7, 8, (2, 3, 1, 1, 7), False, 0.3, 0, 3),
    ):
        query = torch.randn(6, 4, queries, width).to(dtype)
        key, value = torch.randn(6, 2, keys, width).to(dtype), torch.randn(6, 2, keys, 12).to(dtype)
        added = None if mask is None else torch.randn(mask).to(dtype)
        if added is not None and mask[1] == 1:
            added[:, :, :, 2] = -torch.inf
        total = 16 if first == 4 else 14
        starts = torch.arange(24) * queries * total
        rows, columns = torch.arange(queries) + 1, torch.arange(keys) + first
        drawn = seed if dropout_p else None
        rest = (3, is_causal, 0.3, rows, columns, dropout_p, drawn, salt, starts, total, total == 16)
        if added is None:  # heads side by side, as a product for all three wrote them
            query, key, value = (among_others(x) for x in (query, key, value))
        masks = [added] if added is None or mask[2] == 4 else [added > 0]
        for chosen in masks:
            yield "indexed_attention", (query, key, value, chosen, *rest, window)
            out, sums = indexed_attention_reference(query, key, value, chosen, *rest, window)
            learned = chosen is not None and chosen.dtype == dtype
            yield (
                "indexed_attention_backward",
                (torch.randn_like(out), query, key, value, chosen, out, sums, *rest, learned, window),
            )


def among_others(x: Tensor) -> Tensor:
    """The same heads (B, H, S, D), which lie as (B, S, H, D) beside further elements."""
    lies = torch.cat([x, x[..., :3]], -1).transpose(1, 2).contiguous()
    return lies.transpose(1, 2)[..., : x.shape[-1]]


def compare(changed: str) -> int:
    """How many cases agree; raises AssertionError where one does not. changed: the one kernel that is compared then,
    whose first tensor is changed by 1 % before it is told: a fault that the comparison must see."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # what a kernel leaves out is NaN, never what lay there before
    triton_norms.BACKWARD = ((128, 512, 2),)  # several rows for each program of a backward pass
    linear_cross_entropy.LEAST_ROWS = 128  # several chunks
    triton_merging.ELEMENTS = 256  # several programs for the rows of a head
    triton_rope.PAIRS = 512  # several programs for the heads of a token
    count = 0
    for dtype in (torch.float32, torch.bfloat16):
        for name, arguments in cases(dtype):
            if changed not in ("", name):
                continue
            kernel = KERNELS.kernels[name]
            expected = outputs(kernel.reference(*arguments))
            told = (arguments[0] * 1.01, *arguments[1:]) if name == changed else arguments
            for index, (found, wanted) in enumerate(zip(outputs(kernel.triton()(*told)), expected, strict=True)):
                assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), (name, index)
                assert found.stride() == wanted.stride(), (name, index)
                error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
                assert error <= TOLERANCE[dtype], (name, index, dtype, tuple(arguments[0].shape), float(error))
            count += 1
    return count


def outputs(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A tuple, also of one output; infinities (of masked rows) and NaN compare as numbers, float8 as fp32."""
    several = value if isinstance(value, tuple) else (value,)
    several = tuple(one.float() if one.dtype == torch.float8_e4m3fn else one for one in several)
    return tuple(one.nan_to_num(nan=2e4, posinf=1e4, neginf=-1e4) for one in several)
