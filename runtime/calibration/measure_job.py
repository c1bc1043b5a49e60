"""Measure the processes of a running job and the network between its nodes, as `autopar profile` does under torchrun.

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-endpoint HOST:29500 -m autopar profile       # on both nodes

Every process takes part and measures operators beside the others. Collectives, and sends to a neighbour, are timed
between small products, as in a program, in every group of `groups_of_job` while its siblings do the same.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from rich.table import Table

from autopar.cost_models.job_profile import (
    JobProfile,
    LinkFit,
    groups_of_job,
    job_profile_path,
    load_job_profile,
    save_job_profile,
)
from autopar.cost_models.machine_profile import Measurement, Profile, fit_line
from autopar.errors import AutoparError
from autopar.hardware.cluster import machine_name, nodes_of_job
from autopar.runtime.calibration.beside_collectives import (
    FEWEST_CALLS,
    MOST_CALLS,
    ROUNDS,
    SMALL_BYTES,
    WINDOW_SECONDS,
    WORK_ROWS,
    seconds_beside,
    seconds_of_slowest,
    slowdown_beside,
)
from autopar.runtime.calibration.measure_machine import OnProgress, no_progress, profile_from_points, tables
from autopar.runtime.calibration.measuring_worker import (
    COLLECTIVES,
    MIN_COLLECTIVE_SECONDS,
    Effort,
    census_points,
    crowd,
    mean_over_ranks,
    operator_points,
)
from autopar.runtime.calibration.operator_census import NUM_SAMPLES
from autopar.runtime.collectives.host_graphs import wait
from autopar.runtime.host_memory.host_allocator import keep_freed_memory

SIZES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the full buffer."""
LONGEST_CALL_SECONDS = 0.6
"""Sizes that would take longer are left out: the line is known by then."""
FEWEST_SIZES = 3
CROWD_SECONDS = 1.0
NEIGHBOURS = "neighbours"


def in_job() -> bool:
    """Whether torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ


def calibrate_job(*, force: bool = False, on_progress: OnProgress = no_progress) -> JobProfile:
    """The stored profile of this job's shape; measured (and stored by every node) where there is none, or with `force`.

    Every process of the job has to call it. Raises AutoparError where the nodes hold unequal numbers of processes.
    """
    torch.set_num_threads(1)
    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group("gloo")
    try:
        nodes, ranks_per_node = _shape()
        path = job_profile_path(machine_name(), nodes, ranks_per_node)
        profile = _from_rank_0(None if force else load_job_profile(path))
        if profile is None:
            profile = _from_rank_0(_measure(nodes, ranks_per_node, on_progress))
            assert profile is not None
            if int(os.environ.get("LOCAL_RANK", "0")) == 0:
                save_job_profile(profile)
            dist.barrier()
        return profile
    finally:
        if begun:
            dist.destroy_process_group()


def _from_rank_0(profile: JobProfile | None) -> JobProfile | None:
    """What rank 0 has: files of other nodes may be older."""
    box = [profile]
    dist.broadcast_object_list(box)
    return box[0]


def _shape() -> tuple[int, int]:
    """(nodes, processes per node), the same on every process."""
    world = dist.get_world_size()
    mine = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    sizes = [0] * world
    dist.all_gather_object(sizes, mine)
    if len(set(sizes)) > 1 or world % mine:
        raise AutoparError(f"nodes hold {sorted(set(sizes))} processes: start equally many on each, and profile again")
    return nodes_of_job(world), mine


def _measure(nodes: int, ranks_per_node: int, on_progress: OnProgress) -> JobProfile:
    step = _stepper(on_progress, NUM_SAMPLES + len(groups_of_job(nodes, ranks_per_node)) * (1 + len(COLLECTIVES)))
    machine = _machine(step)
    links = []
    for (ranks, spanned), groups in groups_of_job(nodes, ranks_per_node).items():
        own = _own(groups)
        for kind in (*COLLECTIVES, NEIGHBOURS):
            step()
            run = shift if kind == NEIGHBOURS else partial(collective, kind)
            points = tuple(_points(None if own is None else partial(run, own)))
            latency, rate = fit_line([size for size, _ in points], [seconds for _, seconds in points])
            fit = LinkFit(kind=kind, ranks=ranks, nodes=spanned, latency_seconds=latency, bytes_per_second=rate)
            links.append(replace(fit, points=points))
    fit = next(fit for fit in links if fit.kind == "all_reduce" and fit.ranks == nodes * ranks_per_node)
    group, (largest, _) = dist.group.WORLD, fit.points[-1]
    assert group is not None
    return JobProfile(
        machine=machine,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        links=tuple(links),
        overlap_slowdown=slowdown_beside(group, int(largest), fit.seconds(largest)),
        collective_host_seconds=seconds_beside(group, fit.seconds(SMALL_BYTES)),
    )


def _machine(step: Callable[[], None]) -> Profile:
    """Operators of all processes at once, in CPU time, times what passes meanwhile."""
    world = dist.get_world_size()
    keep_freed_memory()
    everyone: list[list[Measurement]] = [[] for _ in range(world)]
    effort = Effort()
    points = [*operator_points(world, dist.barrier, effort), *census_points(step, effort, world, _crowd())]
    dist.all_gather_object(everyone, points)
    return profile_from_points(mean_over_ranks([point for points in everyone for point in points]))


def _crowd() -> float:
    """`crowd` while every process computes, on average."""
    dist.barrier()
    found = torch.tensor([crowd(CROWD_SECONDS)])
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def collective(kind: str, group: dist.ProcessGroup, size: int) -> None:
    """Start one and wait for it."""
    buffer = torch.zeros(size // 4)
    wait(COLLECTIVES[kind](buffer, group.size(), group.group_name))


def shift(group: dist.ProcessGroup, size: int) -> None:
    """Every process sends to the next of its group, as stages of a pipeline do."""
    buffer, received, mine = torch.zeros(size // 4), torch.empty(size // 4), dist.get_rank(group)
    # the receive first: gloo says that it is ready on the same connection, and behind a send that message would wait
    arrived = dist.irecv(received, group=group, group_src=(mine - 1) % group.size())
    sent = dist.isend(buffer, group=group, group_dst=(mine + 1) % group.size())
    assert sent is not None
    assert arrived is not None
    sent.wait()
    arrived.wait()


def _own(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """This process's group; every process makes all of them."""
    own = None
    for ranks in groups:
        made = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = made
    return own


def _points(call: Callable[[int], None] | None) -> Iterator[tuple[float, float]]:
    """(bytes, seconds that a collective of so many adds to a loop of products), of the slowest process.

    call: starts and awaits one; None where this process is in no group of the shape, it then only waits for the others.
    """
    matrix, group = torch.randn(WORK_ROWS, WORK_ROWS), dist.group.WORLD
    assert group is not None

    def work() -> None:
        torch.mm(matrix, matrix)

    def work_and_call(size: int) -> None:
        work()
        if call is not None:
            call(size)

    for number, size in enumerate(SIZES):
        both = partial(work_and_call, size)
        seconds_of_slowest(both, 1, group)  # connections are made, windows opened
        first = seconds_of_slowest(both, 1, group)
        if number >= FEWEST_SIZES and first > LONGEST_CALL_SECONDS:
            return
        calls = min(max(math.ceil(WINDOW_SECONDS / first), FEWEST_CALLS), MOST_CALLS)
        # a slice of the processor more or less, 10 ms of a share, tells where all calls together take a few of them
        pairs = ROUNDS if calls == MOST_CALLS else 1
        added = [seconds_of_slowest(both, calls, group) - seconds_of_slowest(work, calls, group) for _ in range(pairs)]
        yield float(size), max(statistics.median(added), MIN_COLLECTIVE_SECONDS)


def _stepper(on_progress: OnProgress, of: int) -> Callable[[], None]:
    """A function that counts its calls."""
    done = itertools.count()
    return lambda: on_progress(next(done), of)


def job_tables(profile: JobProfile) -> list[Table]:
    """The profile as rich tables: ceilings, then links by group."""
    links = Table(title=f"{profile.nodes} nodes x {profile.ranks_per_node}: seconds = alpha + bytes / beta")
    for header in ("collective", "ranks", "on nodes", "alpha us", "beta MB/s"):
        links.add_column(header, justify="right")
    for fit in profile.links:
        numbers = (f"{fit.latency_seconds * 1e6:.0f}", f"{fit.bytes_per_second / 1e6:.1f}")
        links.add_row(fit.kind, str(fit.ranks), str(fit.nodes), *numbers)
    return [tables(profile.machine)[0], links]
