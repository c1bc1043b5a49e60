"""A measured profile of one machine, and the cluster it makes.

`autopar.runtime.calibration.measure_machine` measures and fits; this file holds the values, stores them, and turns them
into a `Cluster` for a number of processes. Processes of one machine share its cores and memory, so every ceiling is
kept per number of processes that compute at the same time:

    profile = load_profile();  cluster_from_profile(profile, world_size=4).device.flops_per_second["float32"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import ConfigurationError
from autopar.files import as_record, cache_directory, file_content, write_atomically
from autopar.hardware.cluster import (
    Cluster,
    machine_name,
    measured_cluster_path,
    process_memory_bytes,
)
from autopar.hardware.devices import CollectiveFit, Device, Link, OperatorCurve
from autopar.hardware.hosts import Host
from autopar.hardware.sound_numbers import check_numbers

SAVED_WORLD_SIZES = range(1, 17)
"""Numbers of local processes for which `save_profile` leaves a cluster to `Cluster.detect`."""


MOST_BUSY = 0.1
"""Share of the CPU that other processes may take while something is measured; with more, its seconds say little."""
PASSES = 3
"""Of a careful measurement."""
CENSUS = "census."
"""How the names of points of `runtime/calibration/operator_census.py` begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured point: the mean rate of the ranks that ran it at the same time."""

    name: str
    """ "matmul", "add", "overhead", a collective kind, "census." and an ATen name, "crowd", "slowdown" or "beside"."""
    world_size: int
    """Processes that were busy at the same time."""
    ranks: int
    """Processes of one collective; 1 for operators."""
    size: float
    """Bytes of the full buffer of a collective or of one operand; rows of a square matmul; work of the census."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What one process reaches while `world_size` processes do the same."""

    world_size: int
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    operator_seconds: float
    """A tiny eager operator: dispatch, allocation, launch."""
    operators: tuple[OperatorCurve, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFit:
    """Alpha and beta of a collective while all groups of `world_size` processes run it."""

    world_size: int
    fit: CollectiveFit


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What collectives take from the computation beside them while `world_size` processes are busy."""

    world_size: int
    slowdown: float
    """How many times longer products take beside a large all_reduce."""
    host_seconds: float
    """What is left of a small all_reduce where products hide all that can be hidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything measured on one machine in one calibration."""

    name: str
    device: str
    versions: Mapping[str, str]
    date: str
    """UTC, ISO 8601."""
    ceilings: tuple[Ceilings, ...]
    collectives: tuple[GroupFit, ...]
    points: tuple[Measurement, ...]
    crowd: float = 1.0
    """Seconds that passed per second of CPU time of a process that had a core to itself, but for those of others."""
    overlaps: tuple[Overlap, ...] = ()
    """Empty in profiles of before this was measured."""
    passes: int = PASSES
    """Times that everything was measured; the middle one counts."""
    host: Host | None = None
    """Its memory and its files. None in profiles of before this was measured."""

    @property
    def busy_share(self) -> float:
        """Share of the CPU that went to other processes while the profile was measured."""
        return 1.0 - 1.0 / max(1.0, self.crowd)

    @property
    def is_busy(self) -> bool:
        """Whether so much went to others that the numbers say little of an idle machine."""
        return self.busy_share > MOST_BUSY

    @property
    def lasts(self) -> bool:
        """Whether it was measured on an idle machine, and all that is measured today."""
        return bool(self.overlaps) and not self.is_busy

    @property
    def trust(self) -> tuple[bool, bool, int, float]:
        """The greater of two is that of the profile to keep."""
        return bool(self.overlaps), not self.is_busy, self.passes, -self.crowd


def curves_through(samples: Iterable[tuple[str, float, float]], dtype: str) -> tuple[OperatorCurve, ...]:
    """One curve per operator through samples (operator, work, seconds), by ascending work."""
    found: dict[str, dict[float, float]] = {}
    for operator, work, seconds in samples:
        known = found.setdefault(operator, {})
        known[work] = min(seconds, known.get(work, seconds))
    return tuple(
        OperatorCurve(
            operator=name, dtype=dtype, work=tuple(sorted(points)), seconds=tuple(points[w] for w in sorted(points))
        )
        for name, points in sorted(found.items())
    )


def fit_line(sizes: ArrayLike, seconds: ArrayLike) -> tuple[float, float]:
    """(latency_seconds, bytes_per_second) of the line with least squared *relative* error, both positive.

    Relative, because the points span five orders of magnitude and small buffers are the frequent ones. More bytes take
    no less time: points that say so have their median first (isotonic regression by absolute errors). Else one that
    came out next to nothing, as the difference of two noisy loops may, would draw the line through itself.
    """
    x, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    order = np.argsort(x, kind="stable")
    x, t = x[order], _never_falling(t[order])
    rows = np.stack([1.0 / t, x / t], axis=1)
    latency, slope = np.linalg.lstsq(rows, np.ones_like(t), rcond=None)[0]
    if latency <= 0:  # a line through the origin
        latency, slope = 0.0, float((x / t).sum() / ((x / t) ** 2).sum())
    elif slope <= 0:  # latency only: all sizes cost the same, up to the largest measured
        latency, slope = float(np.median(t)), float(np.median(t)) / float(x.max()) * 1e-3
    return float(latency), float(1.0 / slope)


def profile_path(directory: Path | None = None) -> Path:
    """Where the profile of this machine is stored."""
    return (directory or cache_directory()) / "profiles" / f"{machine_name()}.json"


def _never_falling(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values, of which neighbours that fall get their median until none do (pool adjacent violators)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([float(value)])
        while len(pools) > 1 and np.median(pools[-2]) > np.median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return np.concatenate([np.full(len(pool), np.median(pool)) for pool in pools])


def load_profile(path: Path | None = None) -> Profile | None:
    """The stored profile, by default of this machine; None where nothing was measured.

    Raises ConfigurationError where the file is not a profile, or says what nobody measures.
    """
    path = path or profile_path()
    if not path.exists():
        return None
    try:
        profile = as_record(file_content(path, "the file"), Profile, "the file")
        check_numbers(profile)
        cluster_from_profile(profile, 1)
        return profile
    except ConfigurationError as error:
        raise ConfigurationError(f"{path} is not a profile ({error}): delete it and calibrate again") from error


def save_profile(profile: Profile) -> Path:
    """Store this machine's profile and, beside it, its clusters for `Cluster.detect`; returns the path."""
    path = profile_path()
    write_atomically(path, msgspec.json.format(msgspec.json.encode(profile, order="deterministic"), indent=1))
    for world_size in SAVED_WORLD_SIZES:
        cluster_from_profile(profile, world_size).save(measured_cluster_path(world_size))
    return path


def cluster_from_profile(profile: Profile, world_size: int) -> Cluster:
    """The machine as `world_size` gloo processes, with the ceilings measured under that contention.

    Between two measured sizes the larger one counts (the slower ceilings); beyond the largest, the machine's
    total throughput is divided among more processes.
    """
    if world_size < 1:
        raise ConfigurationError(f"a cluster needs at least one process, not {world_size}")
    ceilings = _ceilings_of(profile.ceilings, world_size)
    crowding = max(1.0, world_size / ceilings.world_size)
    device = device_from_profile(profile, world_size, process_memory_bytes(world_size))
    link = _loopback(profile, ceilings.world_size, crowding, source_of(profile))
    overlap = _overlap_of(profile, world_size)
    return Cluster(
        name=f"1x{world_size} {profile.name}",
        num_nodes=1,
        devices_per_node=world_size,
        device=device,
        intra_link=link,
        inter_link=link,
        collective_backend="gloo",
        profile=_measured(profile),
        overlap_slowdown=overlap.slowdown,
        collective_host_seconds=overlap.host_seconds * crowding,
        host=profile.host,
    )


def device_from_profile(profile: Profile, world_size: int, memory_bytes: int) -> Device:
    """One of `world_size` processes that are busy at the same time."""
    ceilings = _ceilings_of(profile.ceilings, world_size)
    crowding = max(1.0, world_size / ceilings.world_size)
    return Device(
        name=profile.device,
        kind="cpu",
        memory_bytes=memory_bytes,
        flops_per_second={dtype: rate / crowding for dtype, rate in ceilings.flops_per_second.items()},
        memory_bytes_per_second=ceilings.memory_bytes_per_second / crowding,
        launch_seconds=ceilings.operator_seconds * crowding,
        operators=tuple(_slower(curve, crowding) for curve in ceilings.operators),
        sources={"*": source_of(profile)},
    )


def _measured(profile: Profile) -> str:
    others = f", while others took {profile.busy_share:.0%} of the CPU" if profile.is_busy else ""
    brief = " in one pass" if profile.passes == 1 else ""
    return f"measured{brief}: {profile.name}, {profile.date}{others}"


def source_of(profile: Profile) -> str:
    """Where the numbers come from, for `sources`."""
    return f"autopar.runtime.calibration.measure_machine, {profile.name}, {profile.date}"


def _ceilings_of(measured: Sequence[Ceilings], world_size: int) -> Ceilings:
    if not measured:
        raise ConfigurationError("ceilings is empty: nothing was measured")
    by_size = sorted(measured, key=lambda ceilings: ceilings.world_size)
    return next((c for c in by_size if c.world_size >= world_size), by_size[-1])


def _overlap_of(profile: Profile, world_size: int) -> Overlap:
    """Of the next larger number of processes that was measured, else of the largest."""
    by_size = sorted(profile.overlaps, key=lambda overlap: overlap.world_size)
    nothing = Overlap(world_size=world_size, slowdown=1.0, host_seconds=0.0)
    return next((found for found in by_size if found.world_size >= world_size), by_size[-1] if by_size else nothing)


def _slower(curve: OperatorCurve, factor: float) -> OperatorCurve:
    return replace(curve, seconds=tuple(seconds * factor for seconds in curve.seconds))


def _loopback(profile: Profile, world_size: int, crowding: float, source: str) -> Link:
    """The loopback link: the fits of this world size, and a ring rate and hop derived from the all-gather."""
    gathers = [g for g in profile.collectives if g.fit.kind == "all_gather" and g.fit.ranks > 1]
    if not gathers:
        raise ConfigurationError("collectives has no all_gather of two or more ranks: links were not measured")
    sizes = {measured.world_size for measured in gathers}
    chosen = min((size for size in sizes if size >= world_size), default=max(sizes))
    fits = [_crowded(g.fit, crowding, source) for g in profile.collectives if g.world_size == chosen]
    ring = max((fit for fit in fits if fit.kind == "all_gather"), key=lambda fit: fit.ranks)
    return Link(
        name="loopback",
        latency_seconds=ring.latency_seconds / (ring.ranks - 1),
        bytes_per_second=ring.bytes_per_second * (ring.ranks - 1) / ring.ranks,
        source=source,
        fits=tuple(fits),
    )


def _crowded(fit: CollectiveFit, crowding: float, source: str) -> CollectiveFit:
    return CollectiveFit(
        kind=fit.kind,
        ranks=fit.ranks,
        latency_seconds=fit.latency_seconds * crowding,
        bytes_per_second=fit.bytes_per_second / crowding,
        source=source,
    )
