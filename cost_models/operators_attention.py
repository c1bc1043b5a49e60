"""Seconds of fused (flash) attention on a GPU, forward and backward.

Forward multiplies Q K^T and P V, backward the scores again and four gradients. A unit works on a block of rows; a
causal mask halves the work and makes blocks unequal, so that units idle behind the longest one:

    work     = batch * heads * pairs * (2 (d_qk + d_v) + softmax)     forward; pairs = s * t, causal s (t - s / 2)
             = batch * heads * pairs * (6 d_qk + 4 d_v + softmax)     backward
    blocks   = batch * heads * ceil(rows / rows_per_block)
    seconds  = launch + (work / SMs + longest block * (tail + (1 - tail) exp(-work / SMs / longest))) / rate of one SM

    attention_seconds(a100, curve, heads=32, queries=4096, keys=4096, qk_dim=128, v_dim=128, causal=True)   # 7.8e-4

Queries that share keys (GQA) save bytes, not FLOPs; bytes bound only short or single-query calls. Unfused attention is
its kernels: two batched products and a softmax. All arrays broadcast.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.operators_gemm import Rates
from autopar.hardware.device_curves import AttentionCurve, DeviceCurves
from autopar.ops.attention_blocks import Band, Run, seen_blocks

Floats = NDArray[np.float64]


CPU_KEYS_PER_BLOCK = 512
"""Keys that torch's CPU kernel multiplies at a time: where the causal border falls in, the whole block is computed.
Of the time without a mask, fp32 on one AMD EPYC core, torch 2.13, forward and backward: 1.0 of 512 tokens, 0.75 of
1,024, 0.62 to 0.64 of 2,048, 0.56 of 4,096; `causal_share_on_cpu` says 1.0, 0.75, 0.625, 0.5625."""


def causal_share_on_cpu(queries: ArrayLike, keys: ArrayLike) -> Floats:
    """Of the products of all pairs, those that a causal attention computes: of the last queries of a cut sequence.

    The square of the causal mask keeps half of its pairs, and half a block of keys more for each query.
    """
    s, t = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    square = np.minimum(s, t)
    return np.asarray((s * t - square * (square / 2 - np.minimum(square, CPU_KEYS_PER_BLOCK) / 2)) / (s * t))


CPU_SOFTMAX_DIMS = 9.0
"""What the softmax of a pair costs on a CPU that was not measured, in dims of a head: heads of 16, 32, 64 and 128 take
0.91, 1.49, 2.65 and 5.04 ns a pair forward and 2.3, 3.9, 6.7 and 12.8 backward, of 1,024 and 4,096 fp32 tokens on one
AMD EPYC core, torch 2.13. 0.037 ns a dim and 8.9 dims, 0.093 ns a dim and 9.0 dims. On another, products as fast, heads
of 16 and 64 take 1.5 and 3.7, 4.2 and 9.7 ns: 18 and 20 dims."""
MOST_SOFTMAX_DIMS = 64.0
"""More is noise of a measurement."""
CPU_HEAD_DIM, CPU_NARROW_DIM = 64, 16
"""Dims of the heads whose FLOP/s a CPU's rates and curves of attention say, and of those measured beside them."""
NARROW = "_narrow"
"""Suffix of the curves of narrow heads."""


def softmax_on_cpu(qk_dim: float, v_dim: float, softmax_dims: float = CPU_SOFTMAX_DIMS) -> float:
    """Seconds of a FLOP of attention on a CPU, against one of heads of `CPU_HEAD_DIM`."""
    dims = (qk_dim + v_dim) / 2
    return (1 + softmax_dims / dims) / (1 + softmax_dims / CPU_HEAD_DIM)


def measured_softmax_dims(wide_seconds: float, narrow_seconds: float) -> float:
    """What the softmax of a pair costs in dims of a head, of the same pairs with wide and with narrow heads: their
    seconds are a line in the dims."""
    if wide_seconds <= narrow_seconds:
        return MOST_SOFTMAX_DIMS
    found = (CPU_HEAD_DIM * narrow_seconds - CPU_NARROW_DIM * wide_seconds) / (wide_seconds - narrow_seconds)
    return min(max(found, 0.0), MOST_SOFTMAX_DIMS)


def keys_in_zigzag(queries: ArrayLike, keys: ArrayLike, kind: str) -> Floats:
    """`keys_of_pairs` of queries in zigzag order, of a device of this kind: they are two runs, of which each sees a
    square of its own, and together half of the keys in front of these."""
    s, t = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    return keys_of_pairs(s, s * t / 2 - s * s / 4 + 2 * square_pairs(s / 2, kind), kind)


def square_pairs(queries: ArrayLike, kind: str) -> Floats:
    """Pairs that a causal attention of as many keys as queries computes on a device of this kind."""
    s = np.asarray(queries, np.float64)
    return np.asarray(s * s * (causal_share_on_cpu(s, s) if kind == "cpu" else 0.5))


@cache
def pairs_in_blocks(rows: tuple[Run, ...], keys: tuple[Run, ...], band: Band, kind: str) -> float:
    """Pairs that attention computes of runs of rows and keys on a device of this kind."""
    seen = 0.0
    for block in seen_blocks(rows, keys, band):
        own = block.stop - block.start
        seen += sum(
            own * (part.stop - part.start) if part.is_whole else float(square_pairs(own, kind)) for part in block.keys
        )
    return seen


def keys_in_window(queries: ArrayLike, keys: ArrayLike, band: Band, kind: str) -> Floats:
    """The keys of which whole products cost what a window costs: of the last queries where it is causal, else of those
    in the middle, which see most."""
    found, length = [], int(np.rint(keys))
    for each in np.ravel(np.asarray(queries, np.float64)):
        own = min(length, max(1, round(float(each))))
        start = (length - own) // (1 if band.after == 0 else 2)
        found.append(pairs_in_blocks(((start, own),), ((0, length),), band, kind) / own)
    return np.reshape(np.asarray(found, np.float64), np.shape(queries))


def keys_of_pairs(queries: ArrayLike, pairs: ArrayLike, kind: str) -> Floats:
    """The keys of whose last queries as many see so many pairs: what stands for blocks of another form."""
    s, seen = np.asarray(queries, np.float64), np.asarray(pairs, np.float64)
    return np.asarray((seen - square_pairs(s, kind)) / s + s)


def attention_curve(curves: DeviceCurves, backward: bool) -> AttentionCurve:
    """The constants of one direction, else plain physics."""
    return curves.attention.get("backward" if backward else "forward") or AttentionCurve()


def attention_seconds(
    rates: Rates,
    curve: AttentionCurve,
    *,
    batch: ArrayLike = 1,
    heads: ArrayLike,
    key_heads: ArrayLike | None = None,
    queries: ArrayLike,
    keys: ArrayLike,
    qk_dim: ArrayLike,
    v_dim: ArrayLike,
    causal: ArrayLike = False,
    backward: bool = False,
    element_bytes: float = 2,
) -> Floats:
    """Seconds of fused attention over `heads` heads of queries; `key_heads`: heads of keys and values (GQA)."""
    b, h, s, t, d, e, half = (np.asarray(x, np.float64) for x in (batch, heads, queries, keys, qk_dim, v_dim, causal))
    pairs = s * t - half * np.minimum(s, t) * np.minimum(s, t) / 2
    per_pair = (6 * d + 4 * e if backward else 2 * (d + e)) + curve.softmax_flops
    rows = t if backward else s
    blocks = np.ceil(rows / curve.rows_per_block)
    longest = np.where(half > 0, np.minimum(s * t, pairs * 2), pairs) / blocks * per_pair
    average = b * h * pairs * per_pair / rates.sm_count
    idle = longest * (curve.tail + (1 - curve.tail) * np.exp(-average / np.maximum(longest, 1)))
    compute = (average + idle) / (rates.flops_per_second * curve.rate_fraction / rates.sm_count)
    shared = h if key_heads is None else np.asarray(key_heads, np.float64)
    # backward reads these four and the output's gradient, and writes three gradients, that of Q in float32
    moved = (s * h * (d + e) + t * shared * (d + e)) * b * element_bytes * (2.5 if backward else 1)
    return np.asarray(curve.launch_seconds + np.maximum(compute, moved / rates.memory_bytes_per_second))
