"""What a collective of CPU tensors takes from the computation beside it, for `Cluster.overlap_slowdown` and
`Cluster.collective_host_seconds`.

Processes share their cores with the threads that move their bytes: a collective that hides behind products makes them
slower, and its start, its sums and what the scheduler takes are hidden by nothing.

    slowdown_beside(group, size=1 << 22, seconds=0.02)     # 1.5: of products beside an all_reduce of 4 MiB
    seconds_beside(group, seconds=0.004)                   # 2e-3: what a small one adds however well it hides

Every process of the group calls them at the same time, and gets the same number.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopar.runtime.collectives import host_graphs
from autopar.runtime.collectives.host_graphs import MaybeStarted

SHARE = 0.8
"""Of the length of a collective, in which products are timed beside it: it is on its way all the time."""
SMALL_BYTES = 1 << 16
"""Of an all_reduce that takes its starts and little else."""
HIDDEN = 3.0
"""How many times as long as such a collective the products beside it take, so that all of it that can be hidden is."""
WORK_ROWS = 256
"""Rows of a product: a millisecond."""
WINDOW_SECONDS = 0.2
ROUNDS = 3
"""Each pair of measurements, with the collective and without, of which the middle one counts."""
FEWEST_CALLS, MOST_CALLS = 3, 20


def slowdown_beside(group: dist.ProcessGroup, size: int, seconds: float) -> float:
    """How many times longer a product takes beside an all_reduce of so many bytes, which takes so long; the mean over
    the processes, at least 1."""
    matrix, buffer = torch.randn(WORK_ROWS, WORK_ROWS), torch.zeros(size // 4)
    window = SHARE * seconds
    alone, beside = [], []
    for _ in range(ROUNDS):
        dist.barrier(group)
        alone.append(_seconds_of_product(matrix, window))
        dist.barrier(group)
        started = _all_reduce(buffer, group)
        beside.append(_seconds_of_product(matrix, window))
        host_graphs.wait(started)
    found = torch.tensor([statistics.median(beside) / statistics.median(alone)])
    dist.all_reduce(found, group=group)
    return max(1.0, float(found) / group.size())


def seconds_beside(group: dist.ProcessGroup, seconds: float) -> float:
    """What an all_reduce of `SMALL_BYTES` adds to products that take `HIDDEN` times as long, of the slowest process:
    the share of the processor, which nothing hides. seconds: of such an all_reduce that is waited for."""
    matrix, buffer = torch.randn(WORK_ROWS, WORK_ROWS), torch.zeros(SMALL_BYTES // 4)
    window = HIDDEN * seconds
    products = torch.tensor([math.ceil(window / _seconds_of_product(matrix, window))])
    dist.all_reduce(products, op=dist.ReduceOp.MAX, group=group)

    def work() -> None:
        for _ in range(int(products)):
            torch.mm(matrix, matrix)

    def work_beside() -> None:
        started = _all_reduce(buffer, group)
        work()
        host_graphs.wait(started)

    calls = min(max(math.ceil(WINDOW_SECONDS / window), FEWEST_CALLS), MOST_CALLS)
    pairs = [
        (seconds_of_slowest(work_beside, calls, group), seconds_of_slowest(work, calls, group)) for _ in range(ROUNDS)
    ]
    return max(0.0, statistics.median(beside - alone for beside, alone in pairs))


def seconds_of_slowest(call: Callable[[], object], calls: int, group: dist.ProcessGroup) -> float:
    """Mean seconds of a call, of the slowest process of the group."""
    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = torch.tensor([(time.perf_counter() - begin) / calls])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return float(seconds)


def _all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup) -> MaybeStarted:
    return host_graphs.all_reduce(buffer, "sum", group.group_name, "calibration")


def _seconds_of_product(matrix: torch.Tensor, window: float) -> float:
    """Mean seconds of a product, of those that begin within so many seconds."""
    begin, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < window or not count:
        torch.mm(matrix, matrix)
        count += 1
    return passed / count
