"""Refit: a cluster whose compute and whose links are slower or faster by what a run has measured.

    steps = read_steps(Path("run.jsonl"))               # of `runtime/step_log.py`: measured beside predicted
    tiers = tiers_of(steps)                             # Tiers(compute=1.12, communication=0.95): measured / predicted
    refitted(cluster, tiers)                            # operators take 1.12 times as long, collectives 0.95 times

Two factors and no more: a step has two parts that are seen apart, the time in which a rank waits for collectives and
the rest. Each factor is the median over the steps behind the first, in which graphs are made and connections opened.
Where nearly all communication is hidden behind computing, the step has one part: what is exposed is then the difference
of two larger numbers, and waits for slower ranks. Measured on four emulated nodes at 200 Mbit/s: a plan was predicted
to expose 0.04 s of 0.94 s, and waited 0.16 s of 0.78 s. Links 3.9 times slower then made 1.57 s of the 0.95 s predicted
for data parallelism, which took 0.73 s; one factor makes it 0.80 s.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from autopar.errors import ConfigurationError
from autopar.files import as_record, file_content
from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.hardware.devices import Device, Link

FEWEST_STEPS = 3
SMALLEST_SHARE = 0.02
"""Where less of a step than this is predicted to be computing, a log says nothing about it."""
MOSTLY_HIDDEN = 0.2
"""Below this predicted share of exposed communication, a step counts as one part."""
LARGEST_FACTOR = 20.0
"""Beyond it, prediction and run are of different things."""


class LoggedPrediction(msgspec.Struct, frozen=True):
    """What the plan says of a step."""

    seconds: float
    exposed_communication_seconds: float


class LoggedStep(msgspec.Struct, frozen=True):
    """One line of a log; exposed communication is None where it was not measured."""

    seconds: float
    exposed_communication_seconds: float | None
    predicted: LoggedPrediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Measured over predicted seconds, per part of a step; 1.0 where the run says nothing."""

    compute: float
    communication: float


def read_steps(path: Path) -> list[LoggedStep]:
    """The steps of a log behind the first. Raises ConfigurationError where the file is no log, or too short."""
    try:
        lines = [line for line in file_content(path, "it").splitlines() if line]
        steps = [_checked_step(as_record(line, LoggedStep, "a line")) for line in lines]
    except ConfigurationError as error:
        raise ConfigurationError(f"{path} is not a log of steps: {error}; write one with autopar.StepLog") from error
    if len(steps) <= FEWEST_STEPS:
        raise ConfigurationError(
            f"{path} has {len(steps)} steps: log {FEWEST_STEPS + 1} or more, the first is left out"
        )
    return steps[1:]


def _checked_step(step: LoggedStep) -> LoggedStep:
    waited = step.exposed_communication_seconds or 0.0
    if min(step.seconds, step.predicted.seconds) <= 0 or min(waited, step.predicted.exposed_communication_seconds) < 0:
        raise ConfigurationError(f"a step has seconds that nothing takes: {step}")
    return step


def tiers_of(steps: Sequence[LoggedStep]) -> Tiers:
    """The two factors. Raises ConfigurationError where one is beyond `LARGEST_FACTOR`."""
    waited = [step.exposed_communication_seconds for step in steps]
    if any(each is None for each in waited):  # a GPU: the whole step is one part
        ratio = _median_ratio([(step.seconds, step.predicted.seconds) for step in steps])
        return _checked(Tiers(compute=ratio, communication=ratio))
    if any(step.predicted.exposed_communication_seconds < MOSTLY_HIDDEN * step.predicted.seconds for step in steps):
        ratio = _median_ratio([(step.seconds, step.predicted.seconds) for step in steps])
        return _checked(Tiers(compute=ratio, communication=1.0))
    measured = [(step, each) for step, each in zip(steps, waited, strict=True) if each is not None]
    exposed = [(each, step.predicted.exposed_communication_seconds) for step, each in measured]
    rest = [
        (step.seconds - each, step.predicted.seconds - step.predicted.exposed_communication_seconds)
        for step, each in measured
    ]
    whole = min(step.predicted.seconds for step in steps)
    computes = min(predicted for _, predicted in rest) > SMALLEST_SHARE * whole
    return _checked(Tiers(compute=_median_ratio(rest) if computes else 1.0, communication=_median_ratio(exposed)))


def _median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(measured / predicted for measured, predicted in pairs)


def _checked(tiers: Tiers) -> Tiers:
    for name, factor in (("compute", tiers.compute), ("communication", tiers.communication)):
        if not 1.0 / LARGEST_FACTOR < factor < LARGEST_FACTOR:
            raise ConfigurationError(
                f"{name} took {factor:.3g} times what was predicted: the log is of another plan or machine than this "
                "cluster; plan for the machine that runs (autopar profile), and log again"
            )
    return tiers


def refitted(cluster: Cluster, tiers: Tiers) -> Cluster:
    """The cluster with its device and links scaled, and a word about it in `profile`."""
    if isinstance(cluster, MixedCluster):
        raise ConfigurationError(
            f"cluster {cluster.name!r} has several kinds of devices: refit each part by its own run"
        )
    said = f"{cluster.profile}; refitted: compute x {tiers.compute:.3g}, communication x {tiers.communication:.3g}"
    return replace(
        cluster,
        device=_device(cluster.device, tiers.compute),
        intra_link=_link(cluster.intra_link, tiers.communication),
        inter_link=_link(cluster.inter_link, tiers.communication),
        profile=said,
    )


def _device(device: Device, factor: float) -> Device:
    if device.profile is not None:
        raise ConfigurationError(f"{device.name} has kernels measured on a GPU: they are not refitted, measure again")
    return replace(
        device,
        flops_per_second={dtype: rate / factor for dtype, rate in device.flops_per_second.items()},
        memory_bytes_per_second=device.memory_bytes_per_second / factor,
        launch_seconds=device.launch_seconds * factor,
        operators=tuple(
            replace(curve, seconds=tuple(seconds * factor for seconds in curve.seconds)) for curve in device.operators
        ),
    )


def _link(link: Link, factor: float) -> Link:
    return replace(
        link,
        latency_seconds=link.latency_seconds * factor,
        bytes_per_second=link.bytes_per_second / factor,
        fits=tuple(
            replace(fit, latency_seconds=fit.latency_seconds * factor, bytes_per_second=fit.bytes_per_second / factor)
            for fit in link.fits
        ),
    )
