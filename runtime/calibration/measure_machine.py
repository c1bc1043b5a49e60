"""Measure this machine and store its profile, so that `Cluster.detect()` prices plans for it.

    autopar profile            # measures once (two minutes on a quiet machine), then prints what is stored
    autopar profile --force    # measures again

Four gloo processes of one thread each measure the operators of `operator_census.py`, matmuls, a memory-bound operator,
the overhead of an eager operator and the collectives, for 1, 2 and 4 processes that are busy at the same time.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch
from rich.table import Table

from autopar.cost_models.machine_profile import (
    CENSUS,
    Ceilings,
    GroupFit,
    Measurement,
    Overlap,
    Profile,
    curves_through,
    fit_line,
    load_profile,
    save_profile,
)
from autopar.cost_models.operator_costs import STREAMING
from autopar.errors import AutoparError
from autopar.hardware.cluster import machine_name
from autopar.hardware.devices import CollectiveFit, OperatorCurve
from autopar.hardware.hosts import Host
from autopar.runtime.calibration.measure_host import measure_host, memcpy_seconds
from autopar.runtime.calibration.measuring_worker import (
    BESIDE,
    COLLECTIVES,
    CROWD,
    PROGRESS,
    SLOWDOWN,
    WORLD_SIZES,
    Effort,
)

log = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[int, int], None]

CAREFUL = Effort()
BRIEF = Effort(passes=1, collective_calls=30)
"""For who waits for it: a minute on a quiet machine of two cores. `autopar profile` measures again."""
POLL_SECONDS = 0.1
PEER_LOST = "Connection closed by peer"
"""What gloo says in a process whose peer has ended."""
TIME_LIMIT_SECONDS = 590.0
"""After this the processes are ended: a machine that needs so long is too busy to be measured."""


def no_progress(done: int, of: int) -> None:
    """Nobody looks on."""


def calibrate(*, force: bool = False, effort: Effort = CAREFUL, on_progress: OnProgress = no_progress) -> Profile:
    """The stored profile of this machine; measured (and stored) first where there is none, where other processes took
    part of the CPU while it was measured or an older version measured less, where it has fewer passes than `effort`, or
    with `force`.

    Of two that measured as much, the one from an idle machine is kept, else that of more passes, else that with more of
    the CPU.
    on_progress(done, of) is called while points are measured. Raises AutoparError where a measuring process fails, with
    its output.
    """
    stored = None if force else load_profile()
    if stored is not None and stored.lasts and stored.passes >= effort.passes:
        return stored
    found = profile_from_points(measure_points(effort=effort, on_progress=on_progress))
    host = measure_host(memcpy_seconds, "memcpy", is_device_memory=True)
    profile = replace(found, passes=effort.passes, host=host)
    if profile.is_busy:
        log.warning(
            f"{profile.name} was busy while it was measured ({profile.busy_share:.0%} of the CPU went to other "
            "processes): predictions will be off, and `autopar profile` measures again"
        )
    if stored is not None and stored.trust > profile.trust:
        return stored
    save_profile(profile)
    return profile


def measure_points(
    total: int = max(WORLD_SIZES), effort: Effort = CAREFUL, on_progress: OnProgress = no_progress
) -> list[Measurement]:
    """Run `total` measuring processes and return what they saw, of each point the middle one of all passes."""
    with tempfile.TemporaryDirectory(prefix="autopar-calibrate-") as folder:
        store, output = str(Path(folder) / "store"), Path(folder) / "points.json"
        workers = [_start_worker(rank, total, store, output, effort) for rank in range(total)]
        try:
            outputs = _outputs(workers, output.with_suffix(PROGRESS), on_progress)
        finally:
            for worker in workers:
                worker.kill()
        if failed := _failures([worker.returncode for worker in workers], outputs):
            raise AutoparError(failed)
        return msgspec.json.decode(output.read_bytes(), type=list[Measurement])


def _failures(codes: Sequence[int], outputs: Sequence[str]) -> str:
    """What every failed process said, causes before those that only lost a peer; empty where none failed."""
    failed = [rank for rank, code in enumerate(codes) if code]
    failed.sort(key=lambda rank: (codes[rank] > 0, PEER_LOST in outputs[rank]))
    said = []
    for rank in failed:
        if codes[rank] < 0:
            ended = f"was ended by {signal.Signals(-codes[rank]).name}"
            if codes[rank] == -signal.SIGKILL:
                ended += " (for want of memory? Leave more free and measure again)"
        else:
            ended = f"failed ({codes[rank]})"
        said.append(f"calibration process {rank} {ended}:\n{outputs[rank]}")
    return "\n".join(said)


def _outputs(workers: Sequence[subprocess.Popen[str]], progress: Path, on_progress: OnProgress) -> list[str]:
    """What every worker printed, once all have ended; the first one leaves "done of" in the file `progress`."""
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    while any(worker.poll() is None for worker in workers):
        if time.monotonic() > deadline:
            raise AutoparError(f"calibration took longer than {TIME_LIMIT_SECONDS:g} s: is the machine busy?")
        if progress.exists() and len(numbers := progress.read_text().split()) == 2:
            on_progress(int(numbers[0]), int(numbers[1]))
        time.sleep(POLL_SECONDS)
    return [worker.communicate()[0] for worker in workers]


def _start_worker(rank: int, total: int, store: str, output: Path, effort: Effort) -> subprocess.Popen[str]:
    package_root = str(Path(sys.modules["autopar.hardware.cluster"].__file__ or "").parent.parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [
        sys.executable,
        "-m",
        "autopar.runtime.calibration.measuring_worker",
        str(rank),
        str(total),
        store,
        str(output),
        msgspec.json.encode(effort).decode(),
    ]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def profile_from_points(points: Sequence[Measurement]) -> Profile:
    """Fit ceilings and collective lines to the points; the name is this machine's, the date is now."""
    census = [p for p in points if p.name.startswith(CENSUS)]
    points = [p for p in points if not p.name.startswith(CENSUS)]
    world_sizes = sorted({p.world_size for p in points})
    return Profile(
        name=machine_name(),
        device="CPU",
        versions={"torch": str(torch.__version__), "python": sys.version.split()[0]},
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ceilings=tuple(_ceilings(points, census, world_size) for world_size in world_sizes),
        collectives=tuple(_group_fits(points)),
        points=tuple(points),
        overlaps=tuple(_overlaps(points)),
        crowd=max((p.seconds for p in points if p.name == CROWD), default=1.0),
    )


def _ceilings(points: Sequence[Measurement], census: Sequence[Measurement], world_size: int) -> Ceilings:
    own = [p for p in points if p.world_size == world_size]
    curves = _curves(points, census, world_size)
    streaming = next(curve for curve in curves if curve.operator == STREAMING)
    return Ceilings(
        world_size=world_size,
        flops_per_second={"float32": _matmul_rate(own)},
        memory_bytes_per_second=streaming.work[-1] / streaming.seconds[-1],
        operator_seconds=streaming.seconds[0],
        operators=curves,
    )


def _curves(points: Sequence[Measurement], census: Sequence[Measurement], world_size: int) -> tuple[OperatorCurve, ...]:
    """The operators under this contention; where only one process alone was measured, as slow as its matmuls are."""
    nearest = max((p.world_size for p in census if p.world_size <= world_size), default=0)
    alone, busy = ([p for p in points if p.world_size == size] for size in (nearest, world_size))
    slower = max(1.0, _matmul_rate(alone) / _matmul_rate(busy))
    named = [(p.name.removeprefix(CENSUS), p.size, p.seconds * slower) for p in census if p.world_size == nearest]
    return curves_through(named, "float32")


def _matmul_rate(points: Sequence[Measurement]) -> float:
    return max(2.0 * p.size**3 / p.seconds for p in points if p.name == "matmul")


def _group_fits(points: Sequence[Measurement]) -> list[GroupFit]:
    fits = []
    for world_size, kind, ranks in sorted({(p.world_size, p.name, p.ranks) for p in points if p.name in COLLECTIVES}):
        line = [p for p in points if (p.world_size, p.name, p.ranks) == (world_size, kind, ranks)]
        latency, rate = fit_line([p.size for p in line], [p.seconds for p in line])
        fit = CollectiveFit(kind=kind, ranks=ranks, latency_seconds=latency, bytes_per_second=rate)
        fits.append(GroupFit(world_size=world_size, fit=fit))
    return fits


def _overlaps(points: Sequence[Measurement]) -> Iterator[Overlap]:
    """One for every number of processes beside whose collectives products were timed."""
    found = {(p.name, p.world_size): p.seconds for p in points}
    for (name, world_size), slowdown in sorted(found.items()):
        if name == SLOWDOWN:
            yield Overlap(world_size=world_size, slowdown=slowdown, host_seconds=found[BESIDE, world_size])


def tables(profile: Profile) -> list[Table]:
    """The profile as rich tables: ceilings per contention, then collectives."""
    ceilings = Table(title=f"{profile.name}, {profile.date}")
    for header in ("busy processes", "fp32 GFLOP/s", "memory GB/s", "operator us", "beside collectives"):
        ceilings.add_column(header, justify="right")
    overlaps = {overlap.world_size: overlap for overlap in profile.overlaps}
    for c in profile.ceilings:
        overlap = overlaps.get(c.world_size)
        beside = "" if overlap is None else f"{overlap.slowdown:.2f} x + {overlap.host_seconds * 1e6:.0f} us"
        rates = (
            c.flops_per_second["float32"] / 1e9,
            c.memory_bytes_per_second / 1e9,
            c.operator_seconds * 1e6,
        )
        ceilings.add_row(str(c.world_size), *(f"{rate:.2f}" for rate in rates), beside)
    collectives = Table(title="seconds = alpha + bytes of the full buffer / beta")
    for header in ("busy processes", "collective", "ranks", "alpha us", "beta MB/s"):
        collectives.add_column(header, justify="right")
    for world_size, fit in ((group.world_size, group.fit) for group in profile.collectives):
        line = (f"{fit.latency_seconds * 1e6:.0f}", f"{fit.bytes_per_second / 1e6:.0f}")
        collectives.add_row(str(world_size), fit.kind, str(fit.ranks), *line)
    return [ceilings, collectives, *([] if profile.host is None else [host_table(profile.host)])]


def host_table(host: Host) -> Table:
    """Memory, copies and files of a host."""
    found = Table(title=f"the host: {host.link.name}, {host.memory_bytes / 2**30:.0f} GiB")
    for header in ("memory GB/s", "to the host GB/s", "from it", "both at once", "latency us", "file read", "written"):
        found.add_column(header, justify="right")
    link, disk = host.link, host.storage
    rates = [host.memory_bytes_per_second, link.to_host_bytes_per_second, link.from_host_bytes_per_second,
             link.both_bytes_per_second]  # fmt: skip
    files = [] if disk is None else [disk.read_bytes_per_second, disk.write_bytes_per_second]
    row = [f"{rate / 1e9:.2f}" for rate in rates] + [f"{link.latency_seconds * 1e6:.1f}"]
    found.add_row(*row, *(f"{rate / 1e9:.2f}" for rate in files))
    return found
