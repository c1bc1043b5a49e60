"""The host's allocator, told to keep what a training step frees.

A step allocates the same bytes as the one before. By default glibc hands freed memory back to the kernel where it lies
at the end of its heap, and takes large buffers from the kernel each time: the next step faults every page in again, one
by one, which costs a small model up to a tenth of its step. Allocators of GPUs keep freed memory for the same reason.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEPT_BYTES = (1 << 30, 32 << 20)
"""Thresholds to try, the largest first: older versions of glibc refuse to map less than what 32 MiB or more take."""
_USERS_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let malloc of this process reuse up to 1 GiB of freed memory, and buffers of that size; True where it does.

    False, and nothing is changed, where the C library has no such settings or the user has chosen some by the
    environment (`MALLOC_TRIM_THRESHOLD_` and its like).
    """
    if any(name in os.environ for name in _USERS_CHOICES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    keeps = [any(mallopt(kind, size) for size in _KEPT_BYTES) for kind in (_TRIM_THRESHOLD, _MMAP_THRESHOLD)]
    return all(keeps)
