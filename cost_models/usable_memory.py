"""Usable memory: what the allocator and the driver leave of a device's memory.

usable_bytes(80 * 10**9, "cuda")    # without the context, and 3 % that fragmentation takes
"""

from __future__ import annotations

CONTEXT_BYTES = {"cuda": 750 * 2**20, "cpu": 0}
"""CUDA context with loaded kernels: between 0.5 and 1 GB; from memory, to be calibrated. A CPU process's own
interpreter and libraries are not counted: they are there before the plan."""
FRAGMENTATION_FRACTION = {"cuda": 0.03, "cpu": 0.0}
"""Part of the memory that the caching allocator cannot use: the calibrated margin of 3 % that the goals for
fits / does-not-fit assume."""


def usable_bytes(memory_bytes: int, kind: str) -> int:
    """What a plan may fill of a device of this kind: total minus context minus fragmentation."""
    return int(memory_bytes * (1.0 - FRAGMENTATION_FRACTION[kind])) - CONTEXT_BYTES[kind]
