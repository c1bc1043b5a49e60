"""One process of the calibration: times operators and collectives while its peers do the same.

Started by `measure_machine` as `python -m autopar.runtime.calibration.measuring_worker RANK WORLD_SIZE STORE OUTPUT
EFFORT`; rank 0 writes the points, averaged over ranks, to OUTPUT as JSON. Each measurement begins at a barrier and
loops for a fixed time, so that all ranks are busy together: they share cores, caches and the loopback, and a plan runs
under the same contention.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from autopar.cost_models.machine_profile import CENSUS, PASSES, Measurement, fit_line
from autopar.files import write_atomically
from autopar.runtime.calibration.beside_collectives import SMALL_BYTES, seconds_beside, slowdown_beside
from autopar.runtime.calibration.operator_census import NUM_SAMPLES, rounds
from autopar.runtime.calibration.product_census import Sample
from autopar.runtime.collectives import host_graphs
from autopar.runtime.collectives.host_graphs import MaybeStarted
from autopar.runtime.host_memory.host_allocator import keep_freed_memory

WORLD_SIZES = (1, 2, 4)
"""Numbers of processes that are busy together, one after the other."""
MATMUL_ROWS = (128, 256, 512)
MEMORY_BYTES = (1 << 20, 1 << 22)
"""Bytes of one operand of an addition. From 16 MiB on, glibc returns each freed result to the kernel in
some processes and not in others: page faults then cost up to 10 times the addition, and no rate fits both."""
COLLECTIVE_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
MIN_COLLECTIVE_SECONDS = 2e-5
"""What a collective costs at least: the difference of two noisy loops may come out negative."""
WORK_ROWS = 512
"""Columns of the tensors of a layer: some ms on one core."""
WARMUP_CALLS = 2
PROGRESS = ".progress"
"""Suffix of the file in which rank 0 leaves "done of", in points, beside its output."""
CENSUS_WINDOW_SECONDS = 0.01
CROWD = "crowd"
"""Name of the points that hold what `crowd` found, in place of seconds."""
SLOWDOWN = "slowdown"
"""Of those that hold what `slowdown_beside` found."""
BESIDE = "beside"
"""Of those that hold the seconds of `seconds_beside`."""
BUSY_WINDOW_SECONDS = 0.3
OVERHEAD_CALLS = 100
"""Calls of the tiny operator between two looks at the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long everything is measured. Less says the same about fewer calls: enough to see that all of it runs."""

    passes: int = PASSES
    """Everything is measured this often and the middle pass counts: a neighbour's burst spoils one pass only."""
    operator_seconds: float = 0.06
    """How long one operator is repeated: long against the 4 ms scheduler tick of ranks that share a core."""
    census_calls: tuple[int, int] = (3, 15)
    """Least and most calls of an operator of the census."""
    collective_calls: int = 10
    lone_layers: int = 40
    """Layers without a collective, against which every collective of a group is measured."""


def _all_to_all(buffer: torch.Tensor, ranks: int, group: str) -> MaybeStarted:
    splits = [buffer.numel() // ranks] * ranks
    return host_graphs.all_to_all(buffer, splits, splits, group, "calibration")


COLLECTIVES: dict[str, Callable[[torch.Tensor, int, str], MaybeStarted]] = {
    "all_reduce": lambda buffer, ranks, group: host_graphs.all_reduce(buffer, "sum", group, "calibration"),
    # the full buffer of an all-gather is its output
    "all_gather": lambda buffer, ranks, group: host_graphs.all_gather(
        buffer[: buffer.numel() // ranks], ranks, group, "calibration"
    ),
    "reduce_scatter": lambda buffer, ranks, group: host_graphs.reduce_scatter(
        buffer, "sum", ranks, group, "calibration"
    ),
    "all_to_all": _all_to_all,
}
"""What compiled programs run."""


def operator_points(world_size: int, barrier: Callable[[], object], effort: Effort) -> Iterator[Measurement]:
    """Time matmuls, additions and the overhead of a tiny operator, with `world_size` ranks busy."""

    def point(name: str, size: int, call: Callable[[], object], calls: int = 1) -> Measurement:
        barrier()
        seconds = _seconds_per_call(call, effort.operator_seconds) / calls
        return Measurement(name=name, world_size=world_size, ranks=1, size=size, seconds=seconds)

    for rows in MATMUL_ROWS:
        a, b = torch.randn(rows, rows), torch.randn(rows, rows)
        yield point("matmul", rows, partial(torch.ops.aten.mm.default, a, b))
    for size in MEMORY_BYTES:
        x, y = torch.zeros(size // 4), torch.zeros(size // 4)
        yield point("add", size, partial(torch.ops.aten.add.Tensor, x, y))
    tiny = torch.zeros(4)

    def overhead() -> None:
        for _ in range(OVERHEAD_CALLS):
            torch.ops.aten.add.Tensor(tiny, tiny)

    yield point("overhead", 0, overhead, OVERHEAD_CALLS)


def census_points(
    step: Callable[[], None], effort: Effort, world_size: int = 1, crowd: float = 1.0
) -> Iterator[Measurement]:
    """Every operator of the census while `world_size` ranks run it, in turns with others of its size.

    Medians of the thread's CPU time, so that a rank is not charged for what the scheduler gives its peers, times
    `crowd`, the seconds that pass per second of CPU time.
    """
    for turn in rounds():
        for sample, seconds in zip(turn, _seconds_in_turns(turn, effort), strict=True):
            step()
            yield Measurement(
                name=CENSUS + sample.name, world_size=world_size, ranks=1, size=sample.work,
                seconds=statistics.median(seconds) / sample.calls * crowd,
            )  # fmt: skip


def _seconds_in_turns(turn: Sequence[Sample], effort: Effort) -> list[list[float]]:
    """CPU seconds of every call of each, behind one that is not timed; in another order every time, since what ran last
    has left most in the caches."""
    for sample in turn:
        sample.call()
    (least, most), found = effort.census_calls, [list[float]() for _ in turn]
    enough, order, draw = CENSUS_WINDOW_SECONDS * len(turn), list(range(len(turn))), random.Random(0)
    while len(found[0]) < least or (len(found[0]) < most and sum(map(sum, found)) < enough):
        draw.shuffle(order)
        for place in order:
            begin = time.thread_time()
            turn[place].call()
            found[place].append(time.thread_time() - begin)
    return found


def crowd(window_seconds: float) -> float:
    """Seconds that pass per second of CPU time while this thread computes: 1 where it has a core to itself, 2 where it
    gets half of one, by the cores of its machine, by a limit, or by other processes."""
    matrix = torch.randn(WORK_ROWS, WORK_ROWS)
    begin, busy = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begin < window_seconds:
        torch.mm(matrix, matrix)
    return max(1.0, (time.perf_counter() - begin) / (time.thread_time() - busy))


def collective_points(world_size: int, group: dist.ProcessGroup, effort: Effort) -> Iterator[Measurement]:
    """Time each collective within `group` while the other groups of `world_size` ranks do the same.

    Seconds are what a collective adds to a loop of `layer_of_work`: a program computes between its collectives, so its
    ranks arrive at different times, wait for the last one, and find the cores busy. Behind a product of 0.3 ms an
    all-gather of 1 KiB between two ranks of a two-core machine took 0.3 ms, behind a layer 1.9 ms.
    """
    ranks, work = group.size(), layer_of_work()
    _seconds_of_loop(work, WARMUP_CALLS, group)
    alone = _seconds_of_loop(work, effort.lone_layers, group)
    for kind, collective in COLLECTIVES.items():
        for size in COLLECTIVE_BYTES:
            call = partial(collective, torch.zeros(size // 4), ranks, group.group_name)
            host_graphs.wait(call())
            added = _seconds_of_loop(partial(_work_and_wait, work, call), effort.collective_calls, group) - alone
            yield Measurement(
                name=kind, world_size=world_size, ranks=ranks, size=size, seconds=max(added, MIN_COLLECTIVE_SECONDS)
            )


def overlap_points(
    world_size: int, group: dist.ProcessGroup, measured: Sequence[Measurement]
) -> Iterator[Measurement]:
    """What collectives take from the computation beside them. measured: the collectives of this group, of all
    processes."""
    line = [p for p in measured if p.name == "all_reduce"]
    latency, rate = fit_line([p.size for p in line], [p.seconds for p in line])
    largest = COLLECTIVE_BYTES[-1]
    for name, seconds in (
        (SLOWDOWN, slowdown_beside(group, largest, latency + largest / rate)),
        (BESIDE, seconds_beside(group, latency + SMALL_BYTES / rate)),
    ):
        yield Measurement(name=name, world_size=world_size, ranks=group.size(), size=0,
                          seconds=max(seconds, MIN_COLLECTIVE_SECONDS))  # fmt: skip


def layer_of_work() -> Callable[[], None]:
    """Some milliseconds of what a layer does: products, and operators bound by memory on tensors of 2 MiB."""
    matrix, wide = torch.randn(WORK_ROWS, WORK_ROWS), torch.randn(2 * WORK_ROWS, WORK_ROWS)
    aten = torch.ops.aten

    def work() -> None:
        aten.mm.default(wide, matrix)
        aten.gelu.default(aten.add.Tensor(wide, wide))
        aten.mul.Tensor(wide, aten.mul.Tensor(wide, 0.5))

    return work


def _work_and_wait(work: Callable[[], None], collective: Callable[[], MaybeStarted]) -> None:
    work()
    host_graphs.wait(collective())


def _seconds_per_call(call: Callable[[], object], window_seconds: float) -> float:
    for _ in range(WARMUP_CALLS):
        call()
    calls, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < window_seconds:
        call()
        calls += 1
    return elapsed / calls


def _seconds_of_loop(call: Callable[[], object], calls: int, group: dist.ProcessGroup) -> float:
    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def own_groups(rank: int, world_size: int) -> list[dist.ProcessGroup]:
    """This rank's groups while the first `world_size` ranks are busy: all of them, and the pairs of four.

    Empty for a rank that is idle then. Every rank has to call this, as with `dist.new_group`.
    """
    groups = []
    for size in sorted({world_size, min(2, world_size)}, reverse=True):
        for first in range(0, world_size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                groups.append(group)
    return groups


def _takes_census(world_size: int) -> bool:
    """Whether every rank has a core of its own. More ranks take turns, and run no slower in theirs."""
    return world_size == 1 or world_size <= usable_cores()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(groups: dict[int, list[dist.ProcessGroup]], step: Callable[[], None], effort: Effort) -> list[Measurement]:
    """One pass over all points of this rank, world size after world size; idle ranks wait at the barrier."""
    points: list[Measurement] = []
    for world_size, own in groups.items():
        if own:
            points += operator_points(world_size, partial(dist.barrier, own[0]), effort)
            if _takes_census(world_size):
                found = [crowd(BUSY_WINDOW_SECONDS)]
                points += census_points(step, effort, world_size)
                found.append(crowd(BUSY_WINDOW_SECONDS))
                points.append(Measurement(name=CROWD, world_size=world_size, ranks=1, size=0, seconds=max(found)))
        if world_size > 1:
            for group in own:
                measured = list(collective_points(world_size, group, effort))
                points += measured
                if group.size() == world_size:
                    points += overlap_points(world_size, group, _of_everyone(measured, group))
        dist.barrier()
    return points


def _of_everyone(points: list[Measurement], group: dist.ProcessGroup) -> list[Measurement]:
    """The means over the processes of a group, the same on each."""
    everyone: list[list[Measurement]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyone, points, group=group)
    return mean_over_ranks([point for found in everyone for point in found])


def mean_over_ranks(points: list[Measurement]) -> list[Measurement]:
    """One point per (name, world size, ranks, size).

    The harmonic mean of the ranks' seconds, their mean rate: the points hold the machine's throughput
    divided by the ranks, even where the scheduler favours one.
    """
    seconds: dict[tuple[str, int, int, float], list[float]] = defaultdict(list)
    for p in points:
        seconds[p.name, p.world_size, p.ranks, p.size].append(p.seconds)
    return [
        Measurement(name=name, world_size=world_size, ranks=ranks, size=size, seconds=statistics.harmonic_mean(values))
        for (name, world_size, ranks, size), values in seconds.items()
    ]


def _stepper(path: Path, of: int) -> Callable[[], None]:
    """A function that counts its calls in the file `path`: "done of"."""
    done = itertools.count()
    return lambda: write_atomically(path, f"{next(done)} {of}".encode())


def _no_step() -> None:
    """Only rank 0 tells how far the measurement is."""


def _steps(groups: dict[int, list[dist.ProcessGroup]]) -> int:
    """Calls of `step` in one pass."""
    return NUM_SAMPLES * sum(_takes_census(world_size) for world_size in groups)


def main(rank: int, total: int, store: str, output: str, effort: Effort) -> None:
    """Measure all passes; rank 0 writes the middle one of each point."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(store, total)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=total)
    groups = {size: own_groups(rank, size) for size in WORLD_SIZES if size <= total}
    step = _stepper(Path(output).with_suffix(PROGRESS), _steps(groups) * effort.passes) if rank == 0 else _no_step
    keep_freed_memory()
    passes = []
    everyone = dist.group.WORLD
    assert everyone is not None
    for _ in range(effort.passes):
        passes.append(_of_everyone(measure(groups, step, effort), everyone))
    if rank == 0:
        middle = [
            sorted(same, key=lambda point: point.seconds)[effort.passes // 2] for same in zip(*passes, strict=True)
        ]
        Path(output).write_bytes(msgspec.json.encode(middle))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], msgspec.json.decode(sys.argv[5], type=Effort))
