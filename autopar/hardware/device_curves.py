"""What a GPU's kernels reach beyond its ceilings: constants of the operator models, each with a physical meaning.

A device has ceilings (`Device.flops_per_second`); kernels reach a part of them that depends on their sizes. The
formulas stand in `cost_models/operators_*.py`, their constants here and in `cost_models/hardware/operator_curves.json`:

    device_curves("A100-80").tier                 # "fitted": constants of this device
    device_curves("L4").tier                      # "shared": constants fitted across devices, none on an L4
    device_curves("L4").gemm["float16"].feed      # a tile of 128 x 128 waits 10 % for its operands

No device ever borrows another device's fitted constants: without its own it has the shared ones, and `tier` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

_UNITS = ("float16", "float32", "float8_e4m3fn", "float4_e2m1fn_x2")
"""The dtypes whose products run on units of their own, as `cost_models.operators_gemm.gemm_curve` asks for them."""

CURVES_PATH = Path(__file__).parent.parent / "cost_models" / "hardware" / "operator_curves.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """Constants of `cost_models.operators_gemm`. The defaults are plain physics: tiles and waves, nothing fitted."""

    rate_fraction: float = 1.0
    """Of the device's best measured rate, that a product without any loss reaches."""
    quantisation: float = 1.0
    """How much of an unfilled last wave is paid: 1 all, 0 none (clocks rise while units idle)."""
    feed: float = 0.0
    """Seconds that a tile of 128 x 128 waits for its operands, per second of multiplying."""
    prologue: float = 0.0
    """Filling the pipeline of a tile and writing its sums, in steps of K."""
    memory_fraction: float = 1.0
    """Of the device's memory rate."""
    resident_speedup: float = 1.0
    """Rate of operands that fit the L2 cache against memory."""
    saturation: float = 0.0
    """Part of the units that must be busy to saturate the memory."""
    overlap: float = 8.0
    """Exponent that joins computing and reading: 1 one after the other, large in parallel."""
    split_seconds: float = 0.0
    """Adding up the parts of a K that is split."""
    split_traffic: float = 1.0
    """Part of the partial sums that goes through memory."""
    launch_seconds: float = 0.0
    """What the smallest product takes."""
    window_bytes: float = 1e18
    """Bytes of the rows in flight beyond which reading slows, by address translation (Pascal: about 100 MB)."""
    window_slowdown: float = 0.0
    """More time per doubling beyond `window_bytes`."""
    batched_tiles: tuple[tuple[int, int], ...] = ()
    """The only tiles that the library uses for batches of products; empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Constants of one family of kernels that memory bounds (`cost_models.operators_memory`)."""

    launch_seconds: float = 0.0
    row_seconds: float = 0.0
    """Latency of one row per element, where a block of threads walks over a row."""
    memory_fraction: float = 1.0
    """Of the device's memory rate."""
    resident_speedup: float = 1.0
    """Rate of a working set that fits the L2 cache against memory."""
    unit_bytes_per_cycle: float = 0.0
    """What one multiprocessor moves per clock with this code, where that bounds before memory does; 0: never."""
    reread_row_bytes: float = 1e18
    """Longer rows do not stay in a multiprocessor between the passes over them."""
    reread: float = 0.0
    """Traffic that reading a long row again adds, per byte of the single pass (fully from twice that length on)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Constants of fused attention (`cost_models.operators_attention`), forward or backward."""

    rate_fraction: float = 1.0
    """Of the best measured matmul rate, without softmax and without idle units."""
    softmax_flops: float = 0.0
    """One score's exponential and rescaling, in FLOPs of the matmul rate."""
    rows_per_block: int = 128
    """Rows of queries (backward: of keys) that one unit works on."""
    tail: float = 0.0
    """Part of the longest block during which units idle at the end."""
    launch_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCurves:
    """Everything that the operator models know of one device beside its ceilings."""

    name: str
    tier: Literal["physics", "shared", "fitted"]
    """physics: nothing fitted; shared: constants fitted across devices; fitted: some fitted on this device."""
    sm_count: int
    """Streaming multiprocessors (AMD: compute units)."""
    l2_bytes: float
    clock_hz: float
    """Boost clock of the multiprocessors."""
    generation: str = ""
    """ "Ampere", "Hopper"; empty where the table names none."""
    gemm: Mapping[str, GemmCurve] = field(default_factory=dict)
    """By dtype, and by "<dtype> batched" where the library treats batches of products otherwise."""
    memory: Mapping[str, MemoryCurve] = field(default_factory=dict)
    """By family of kernels: "elementwise", "norm", "softmax", "gated", "rotary", "lookup"."""
    attention: Mapping[str, AttentionCurve] = field(default_factory=dict)
    """ "forward" and "backward"."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    sm_count: int
    l2_bytes: float
    clock_hz: float
    source: str
    generation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Constants:
    gemm: dict[str, dict[str, float | list[list[int]]]] = field(default_factory=dict)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    attention: dict[str, dict[str, int | float]] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    devices: dict[str, _Units]
    shared: _Constants
    generations: dict[str, _Constants]
    fitted: dict[str, _Constants]


@functools.cache
def _file() -> _File:
    return msgspec.json.decode(CURVES_PATH.read_bytes(), type=_File)


def has_curves(name: str) -> bool:
    """Whether the units and caches of this device are known."""
    return name in _file().devices


def device_curves(name: str, machine: str | None = None) -> DeviceCurves:
    """The best known constants of a device: its own where some were fitted, else those shared by all devices.

    `machine` names another set of fitted constants, of one machine of this type. Raises KeyError for an unknown device.
    """
    fitted = _file().fitted.get(machine or name)
    shared = shared_curves(name)
    if fitted is None:
        return shared
    own = _curves(name, "fitted", fitted, fitted.source)
    return replace(
        own,
        gemm={**shared.gemm, **own.gemm},
        memory={**shared.memory, **own.memory},
        attention={**shared.attention, **own.attention},
    )


def shared_curves(name: str) -> DeviceCurves:
    """The constants that all devices (and, where it has some, all of its generation) share."""
    file = _file()
    curves = _curves(name, "shared", file.shared, file.shared.source)
    generation = file.generations.get(file.devices[name].generation)
    if generation is None:
        return curves
    own = _curves(name, "shared", generation, generation.source)
    return replace(
        curves,
        gemm={**curves.gemm, **own.gemm},
        memory={**curves.memory, **own.memory},
        attention={**curves.attention, **own.attention},
    )


def physics_curves(name: str, launch_seconds: float = 0.0) -> DeviceCurves:
    """Tiles, waves and bytes alone, without one fitted constant: the ablation. launch_seconds: of every product and
    every kernel that memory bounds."""
    gemm = dict.fromkeys(_UNITS, GemmCurve(launch_seconds=launch_seconds))
    memory = {"elementwise": MemoryCurve(launch_seconds=launch_seconds)}
    return replace(_curves(name, "physics", _Constants(), ""), gemm=gemm, memory=memory)


def _curves(
    name: str, tier: Literal["physics", "shared", "fitted"], constants: _Constants, source: str
) -> DeviceCurves:
    units = _file().devices[name]
    return DeviceCurves(
        name=name,
        tier=tier,
        sm_count=units.sm_count,
        l2_bytes=units.l2_bytes,
        clock_hz=units.clock_hz,
        generation=units.generation,
        gemm=msgspec.convert(constants.gemm, dict[str, GemmCurve]),
        memory=msgspec.convert(constants.memory, dict[str, MemoryCurve]),
        attention=msgspec.convert(constants.attention, dict[str, AttentionCurve]),
        source=source,
    )
