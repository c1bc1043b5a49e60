"""Seconds of a matrix product on a GPU, from tiles, waves, the K loop and the bytes moved.

C (M x N) is cut into tiles of bm x bn; a streaming multiprocessor (SM) multiplies one tile at a time, and the last wave
of tiles leaves SMs idle. With few tiles K is split into s parts, whose sums are added afterwards. The library picks the
tile and the split; we take the fastest of its menu:

    tiles  = ceil(M / bm) * ceil(N / bn) * batch * s
    waves  = q * ceil(tiles / SMs) + (1 - q) * max(tiles / SMs, 1)
    tile   = 2 bm bn (ceil(K / s, 32) * window + prologue) / (rate / SMs) * (1 + feed * (128/bm + 128/bn) / 2)
    memory = (A + B + C + partial sums) / (memory rate * min(1, tiles / (SMs * saturation)))
    seconds = launch + min over tiles and splits of ((waves * tile)^p + memory^p)^(1/p) + split

    gemm_seconds(rates, gemm_curve(curves, "float16"), 4096, 4096, 11008)      # A100: 1.61e-3, 1.36e-3 at full rate

All arrays broadcast, so that thousands of shapes are priced in one call. The constants:
`autopar.hardware.device_curves`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.hardware.device_curves import DeviceCurves, GemmCurve

TILES: tuple[tuple[int, int], ...] = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (64, 32), (32, 64), (128, 16), (16, 128), (64, 16), (16, 64),
)  # fmt: skip
"""Tiles (rows, columns) of the kernels in cuBLAS and CUTLASS, as their names say."""

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Into how many parts of K the library may split."""

K_STEP = 32
"""Elements of K that one step of the inner loop takes."""

ROWS_IN_FLIGHT = 128
"""Rows of the first operand per SM that are read at the same time (`GemmCurve.window_bytes`)."""

COLUMNS_IN_FLIGHT = 2048
"""Columns of the second operand, of the whole device: 0, 512 and 2048 were tried on a P100 and a P4."""

ELEMENT_BYTES = {"float4_e2m1fn_x2": 0.5, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the model takes of a device: FLOP/s of the dtype, bytes/s, SMs, bytes of L2, clock."""

    flops_per_second: float
    memory_bytes_per_second: float
    sm_count: int
    l2_bytes: float
    clock_hz: float = 0.0
    """0: unknown, nothing is bound by it."""


def gemm_seconds(
    rates: Rates,
    curve: GemmCurve,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    batch: ArrayLike = 1,
    element_bytes: ArrayLike = 2,
    output_bytes: ArrayLike | None = None,
    accumulate: ArrayLike = False,
) -> Floats:
    """Seconds of `batch` products (m x k) @ (k x n), broadcast over all arrays; 0 where one dim is 0.

    `output_bytes`: of one element of C (default: as the operands); `accumulate`: C is read and added to.
    """
    element = np.asarray(element_bytes, np.float64)
    output = element if output_bytes is None else output_bytes
    columns = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (m, n, k, batch, element, output, accumulate)))
    shape = columns[0].shape
    distinct, back = np.unique(np.stack([c.ravel() for c in columns]), axis=1, return_inverse=True)
    seconds = _distinct_seconds(rates, curve, *distinct)
    return np.asarray(seconds[back.ravel()].reshape(shape))


def _distinct_seconds(
    rates: Rates, curve: GemmCurve, m: Floats, n: Floats, k: Floats, b: Floats, element: Floats, output: Floats,
    accumulate: Floats,
) -> Floats:  # fmt: skip
    seconds = np.full(len(m), np.inf)
    single = b <= 1
    menus = [(np.ones(len(m), bool), TILES)]
    if curve.batched_tiles:
        menus = [(single, TILES), (~single, curve.batched_tiles)]
    columns = (m, n, k, b, element, output, accumulate)
    for chosen, tiles in menus:
        if chosen.any():
            seconds[chosen] = _fastest(rates, curve, np.asarray(tiles, np.float64), *(c[chosen] for c in columns))
    return np.where(np.minimum.reduce([m, n, k, b]) > 0, seconds, 0.0)


def _fastest(
    rates: Rates, curve: GemmCurve, tiles: Floats, m: Floats, n: Floats, k: Floats, b: Floats, element: Floats,
    output: Floats, accumulate: Floats,
) -> Floats:  # fmt: skip
    """(shapes,) seconds with the best tile and split; axes inside: shapes, tiles, splits."""
    m, n, k, b, element, output, accumulate = (x[:, None, None] for x in (m, n, k, b, element, output, accumulate))
    rows, columns = tiles[None, :, 0, None], tiles[None, :, 1, None]
    splits = np.asarray(SPLITS, np.float64)
    filled = np.ceil(m / rows) * np.ceil(n / columns) * b * splits / rates.sm_count
    waves = curve.quantisation * np.ceil(filled) + (1 - curve.quantisation) * np.maximum(filled, 1)
    in_flight = (np.minimum(m, rates.sm_count * ROWS_IN_FLIGHT) + np.minimum(n, COLUMNS_IN_FLIGHT)) * k * element
    window = 1 + curve.window_slowdown * np.maximum(0, np.log2(np.maximum(in_flight, 1) / curve.window_bytes))
    steps = np.ceil(k / splits / K_STEP) * K_STEP * window + curve.prologue
    unit_rate = rates.flops_per_second * curve.rate_fraction / rates.sm_count
    tile_seconds = 2 * rows * columns / unit_rate * (1 + curve.feed * (64 / rows + 64 / columns))
    compute = waves * tile_seconds * steps
    operands = (m * k + k * n) * element * b + m * n * output * b * (1 + accumulate)
    partial_sums = np.where(splits > 1, 2 * 4 * m * n * b * splits * curve.split_traffic, 0.0)
    hit = 1 / (1 + (operands / rates.l2_bytes) ** 2)
    memory_rate = rates.memory_bytes_per_second * curve.memory_fraction * (1 + (curve.resident_speedup - 1) * hit)
    busy = np.minimum(1, filled / curve.saturation) if curve.saturation else 1.0
    # a floor for the fewest tiles: assumption, where the launch counts anyway
    memory = (operands + partial_sums) / (memory_rate * np.maximum(busy, 0.02))
    both = (compute**curve.overlap + memory**curve.overlap) ** (1 / curve.overlap)
    seconds = both + np.where(splits > 1, curve.split_seconds, 0.0)
    return np.asarray(curve.launch_seconds + seconds.min(axis=(1, 2)))


def gemm_curve(curves: DeviceCurves, dtype: str, variant: str = "") -> GemmCurve:
    """The constants of the units that a dtype runs on, else plain physics.

    `variant`: "batched" or "grouped", which some libraries run by other kernels.
    """
    units = {"bfloat16": "float16", "float64": "float32"}.get(dtype, dtype)
    return curves.gemm.get(f"{units} {variant}") or curves.gemm.get(units) or GemmCurve()
