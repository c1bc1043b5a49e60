"""Usable memory: what the allocator and the driver leave of a device's memory.

usable_bytes(80 * 10**9, "cuda", [8])    # without the context, 3 % that fragmentation takes, and NCCL's of 8 ranks
"""

from __future__ import annotations

from collections.abc import Sequence

CONTEXT_BYTES = {"cuda": 750 * 2**20, "cpu": 0}
"""CUDA context with loaded kernels: between 0.5 and 1 GB; from memory, to be calibrated. A CPU process's own
interpreter and libraries are not counted: they are there before the plan."""
FRAGMENTATION_FRACTION = {"cuda": 0.03, "cpu": 0.0}
"""Part of the memory that the caching allocator cannot use: the calibrated margin of 3 % that the goals for
fits / does-not-fit assume."""

PAIR_COMMUNICATOR_BYTES, COMMUNICATOR_BYTES = 544 * 2**20, 688 * 2**20
"""What NCCL holds for a group of two GPUs of a node, and for one of more, once an all_reduce of 4 MB has run: read off
torch on 4 A100s with NVLink (NVIDIA/nccl issue 964, 2023; other algorithms and networks take other buffers). Each
group has its own, unless it shares those of another one. Not measured here; `benchmarks.gpu` does."""


def communicator_bytes(ranks: int, kind: str) -> int:
    """What the communicator of a group of so many ranks holds of a device, beside tensors."""
    if kind != "cuda" or ranks < 2:
        return 0
    return PAIR_COMMUNICATOR_BYTES if ranks == 2 else COMMUNICATOR_BYTES


def usable_bytes(memory_bytes: int, kind: str, groups: Sequence[int] = ()) -> int:
    """What a plan may fill of a device of this kind: total minus context, fragmentation and the communicators of
    groups of so many ranks."""
    communicators = sum(communicator_bytes(ranks, kind) for ranks in groups)
    return int(memory_bytes * (1.0 - FRAGMENTATION_FRACTION[kind])) - CONTEXT_BYTES[kind] - communicators
