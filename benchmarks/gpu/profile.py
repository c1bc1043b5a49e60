"""`autopar profile` on a GPU: kernels beside their prices, and the preset that they make, with the tier "measured".

On a GPU the profile is also left where `Cluster.detect` finds it, so that plans which are made here take it.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any

import msgspec
import torch

from autopar.hardware.cluster import Cluster, machine_name
from autopar.hardware.operator_profile import (
    MeasuredKernel,
    OperatorProfile,
    load_profile,
    operator_profile_path,
    save_profile,
)
from autopar.runtime.calibration.profile_kernels import cases, measured, seconds_on_cuda
from benchmarks.gpu.pricing import REHEARSED, kernel_seconds, priced_device
from benchmarks.gpu.stage import Place, Row
from benchmarks.gpu.timing import median_seconds

REHEARSED_DEVICE = "NVIDIA H100 80GB HBM3"
"""The device that a profile of a rehearsal names: its preset is that of `REHEARSED`."""


def run(place: Place, seconds: float, sizes: Mapping[str, Any], dtypes: list[str]) -> Iterator[Row]:
    """A row per kind of kernel and dtype, then the preset. seconds: after which no further kernel is measured; sizes,
    dtypes: of `cases`."""
    kernels = measured_within(place, seconds, {**sizes, "dtypes": [getattr(torch, name) for name in dtypes]})
    device = priced_device(place)
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        ratios[kernel.kind, kernel.dtype].append(kernel_seconds(kernel, device) / kernel.seconds)
    for (kind, dtype), found in sorted(ratios.items()):
        error = statistics.median(abs(ratio - 1) for ratio in found)
        yield {
            "case": f"{kind} {dtype}",
            "kernels": len(found),
            "predicted_of_measured": statistics.median(found),
            "median_error": error,
        }
    yield preset(place, kernels)


def measured_within(place: Place, seconds: float, sizes: Mapping[str, Any]) -> tuple[MeasuredKernel, ...]:
    """The kernels of the cases that there is time for."""
    timer = seconds_on_cuda if place.on_cuda else partial(median_seconds, device=place.device, repeats=3)
    began = time.monotonic()
    kernels: list[MeasuredKernel] = []
    for case in cases(**sizes):
        if time.monotonic() - began > seconds:
            break
        kernels += measured([case], place.device, timer, lambda done, of: None)
    return tuple(kernels)


def preset(place: Place, kernels: tuple[MeasuredKernel, ...]) -> Row:
    """The profile, and one such device as a cluster that is priced by it."""
    name = torch.cuda.get_device_properties(place.device).name if place.on_cuda else REHEARSED_DEVICE
    profile = OperatorProfile(
        name=machine_name(),
        device=name,
        versions={"torch": str(torch.__version__), "cuda": str(torch.version.cuda)},
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        kernels=kernels,
    )
    if place.on_cuda:
        save_profile(profile, operator_profile_path(name))
        profile = load_profile(operator_profile_path(name))
    cluster = (Cluster.detect(1) if place.on_cuda else Cluster.parse(REHEARSED)).with_operator_profile(profile)
    return {
        "case": "preset",
        "tier": "measured",
        "prices": cluster.profile,
        "cluster": msgspec.to_builtins(cluster, str_keys=True),
    }
