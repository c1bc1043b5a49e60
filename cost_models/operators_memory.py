"""Seconds of kernels that memory bounds: element-wise chains, norms, softmax, lookups, copies.

A kernel reads and writes the bytes of its *fused group* (`kernel_groups`). Small ones do not reach the full rate, since
launching takes its time and a block of threads walks over a row at its own pace; a working set that fits the L2 cache
is read faster than memory:

    memory  = memory rate * fraction * (1 + (resident_speedup - 1) / (1 + (bytes / L2)^2))
    units   = SMs * clock * bytes per cycle                          scalar code moves 2-7 bytes per clock and SM
    rate    = (memory^-4 + units^-4)^(-1/4)
    traffic = bytes * (1 + reread * clip(row bytes / reread_row_bytes - 1, 0, 1))
    seconds = launch + ((row * row_seconds)^4 + (traffic / rate)^4)^(1/4)

    memory_seconds(a100, curve, 200e6)         # 117e-6: 1.7 TB/s
    memory_seconds(a100, curve, 4e3)           # 2e-6: the launch

Constants per family of kernels: `autopar.hardware.device_curves.MemoryCurve`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.operators_gemm import Rates
from autopar.hardware.device_curves import DeviceCurves, MemoryCurve

SERIAL_LOOKUPS = 16
"""Up to so many rows torch's index_select walks one after the other in each thread (its "small index" kernel)."""

_JOIN = 4.0
"""Exponent that joins the latency of rows and the rate of bytes: both limits hold at once, the larger one counts."""


def memory_seconds(
    rates: Rates,
    curve: MemoryCurve,
    nbytes: ArrayLike,
    *,
    row: ArrayLike = 0,
    element_bytes: float = 2,
    launches: ArrayLike = 1,
    share: ArrayLike = 1,
) -> NDArray[np.float64]:
    """Seconds of kernels that move `nbytes` (reads plus writes) once, over all arrays.

    `row`: elements of `element_bytes` that one block of threads handles in turn (0: element-wise kernels);
    `launches`: kernels that this call starts (0 for a member of another operator's kernel); `share`: part of its
    kernel's bytes that a member moves, since all of them compete for the cache.
    """
    sizes = np.asarray(nbytes, np.float64)
    whole = sizes / np.asarray(share, np.float64)
    hit = 1 / (1 + (whole / max(rates.l2_bytes, 1.0)) ** 2)
    full = rates.memory_bytes_per_second * curve.memory_fraction
    elements = np.asarray(row, np.float64)
    again = np.clip(elements * element_bytes / curve.reread_row_bytes - 1, 0, 1) * curve.reread
    inverse = 1 / (full * (1 + (curve.resident_speedup - 1) * hit))
    units = rates.sm_count * rates.clock_hz * curve.unit_bytes_per_cycle
    if units > 0:
        inverse = (inverse**_JOIN + units**-_JOIN) ** (1 / _JOIN)
    stream = sizes * (1 + again) * inverse
    latency = elements * curve.row_seconds
    both = (latency**_JOIN + stream**_JOIN) ** (1 / _JOIN)
    return np.asarray(np.asarray(launches, np.float64) * curve.launch_seconds + both)


def lookup_row(rows: ArrayLike, width: ArrayLike) -> NDArray[np.float64]:
    """Elements in turn of a lookup of `rows` rows of `width` elements: all of them for few rows, one row for many."""
    count = np.asarray(rows, np.float64)
    return np.asarray(np.where(count <= SERIAL_LOOKUPS, count, 1) * np.asarray(width, np.float64))


def memory_curve(curves: DeviceCurves, family: str) -> MemoryCurve:
    """The constants of a family, else of element-wise kernels, else plain physics."""
    return curves.memory.get(family) or curves.memory.get("elementwise") or MemoryCurve()
