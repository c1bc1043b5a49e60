"""Interpolation in a measured profile: the model's curve, bent to what was measured nearby.

Every measured kernel says by which factor the model is wrong at its sizes. Between them the logarithm of the factor is
the mean of the nearest neighbours', weighted by 1 / distance^2 in the logarithms of the sizes:

    seconds(sizes) = model(sizes) * exp(sum_i w_i log(measured_i / model(sizes_i)) / sum_i w_i)

So a measured size costs exactly what was measured, and one far away keeps the curve's shape.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.hardware.operator_profile import MeasuredKernel, OperatorProfile

NEIGHBOURS = 6
"""Nearest measured kernels that count: those beyond say little about tiles and waves at this size."""

Floats = NDArray[np.float64]


def measured_kernels(
    profile: OperatorProfile | None, kind: str, dtype: str, causal: bool = False
) -> tuple[MeasuredKernel, ...]:
    """The kernels of a profile that say something about this kind and dtype."""
    if profile is None:
        return ()
    return tuple(k for k in profile.kernels if (k.kind, k.dtype, k.causal) == (kind, dtype, causal))


def with_measured(kernels: tuple[MeasuredKernel, ...], sizes: Floats, model: Callable[[Floats], Floats]) -> Floats:
    """(n,) seconds at (n, dims) sizes: `model(sizes)` bent to the measured kernels (at least one)."""
    points = np.array([kernel.sizes for kernel in kernels], np.float64)
    factor = np.log(np.array([kernel.seconds for kernel in kernels]) / model(points))
    apart = np.log1p(sizes)[:, None, :] - np.log1p(points)[None]
    distance = (apart**2).sum(axis=2)
    nearest = np.argsort(distance, axis=1, kind="stable")[:, :NEIGHBOURS]
    weight = 1 / (np.take_along_axis(distance, nearest, axis=1) + 1e-12)
    bend = (weight * factor[nearest]).sum(axis=1) / weight.sum(axis=1)
    return np.asarray(model(sizes) * np.exp(bend))
