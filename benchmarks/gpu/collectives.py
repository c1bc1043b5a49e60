"""Collectives over all devices of this machine, beside what the cost model says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost_models.collective_costs import CollectiveKind, collective_seconds
from autopar.cost_models.usable_memory import communicator_bytes
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from benchmarks.gpu.allocator import Memory
from benchmarks.gpu.ranks import num_ranks, on_ranks, slowest
from benchmarks.gpu.stage import Place, Row, attempted
from benchmarks.gpu.timing import median_seconds

KINDS: Mapping[CollectiveKind, Callable[[Tensor, Tensor], Any]] = {
    "all_reduce": lambda whole, part: dist.all_reduce(whole),
    "all_gather": lambda whole, part: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda whole, part: dist.reduce_scatter_tensor(part, whole),
    "all_to_all": lambda whole, part: dist.all_to_all_single(torch.empty_like(whole), whole),
}
"""Kind -> what runs on the full buffer and a rank's part of it."""


def run(place: Place, sizes: Sequence[int], rehearsed_ranks: int) -> Iterator[Row]:
    """sizes: bytes of the full buffer, in bf16."""
    ranks = num_ranks(place, rehearsed_ranks)
    yield attempted("communicators", lambda: {"groups": on_ranks(place, ranks, communicators, ranks)})
    for kind in KINDS:
        yield attempted(kind, lambda kind=kind: {"sizes": on_ranks(place, ranks, measured, kind, ranks, sizes)})  # type: ignore[misc]


def communicators(place: Place, ranks: int) -> list[Row]:
    """What NCCL holds of this device for groups of two and of all ranks, beside what torch's allocator holds: a second
    group of the same ranks says whether they share. On every rank; rank 0 is in all of them."""
    dist.all_reduce(torch.zeros(1, device=place.device))  # the default group has what it needs
    rows = []
    for size in (2, ranks, ranks):
        group = dist.new_group(list(range(size)))
        before = _held_bytes(place)
        if dist.get_rank() < size:
            dist.all_reduce(torch.zeros(1 << 20, device=place.device), group=group)
        dist.barrier()
        held = _held_bytes(place) - before
        predicted = communicator_bytes(size, "cuda")
        rows.append({"ranks": size, "bytes": held, "predicted_bytes": predicted})
    return rows


def _held_bytes(place: Place) -> int:
    """Of the device, and nobody's tensors: other processes' too, where there are some."""
    if place.on_cuda:
        torch.cuda.synchronize(place.device)
    now = Memory.of(place)
    return now.total - now.free - (now.reserved if place.on_cuda else 0)


def measured(place: Place, kind: CollectiveKind, ranks: int, sizes: Sequence[int]) -> list[Row]:
    """On every rank."""
    cluster = Cluster.detect(ranks)
    topology = GroupTopology.of(cluster, (ranks,), (0,))
    rows = []
    for size in sizes:
        whole = torch.zeros(size // 2 // ranks * ranks, dtype=torch.bfloat16, device=place.device)
        part = torch.zeros(whole.numel() // ranks, dtype=whole.dtype, device=place.device)
        call = KINDS[kind]
        seconds = slowest(median_seconds(lambda: call(whole, part), place.device, flush=False), place.device)  # noqa: B023
        predicted = float(collective_seconds(kind, float(size), topology, cluster))
        rows.append(
            {
                "bytes": size,
                "seconds": seconds,
                "predicted_seconds": predicted,
                "predicted_of_measured": predicted / seconds,
            }
        )
    return rows
