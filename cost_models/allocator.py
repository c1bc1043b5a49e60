"""What torch's CUDA caching allocator makes of requests: rounded blocks, and segments that it takes from the device.

    request 1 byte                  counts 512 B in memory_allocated        2 MiB segment
    request 1.5 MiB                 counts 1.5 MiB                         20 MiB segment
    request 37.1 MiB                counts 37.1 MiB (to 512 B)             38 MiB segment

`torch.cuda.max_memory_allocated` is the peak of rounded requests, `max_memory_reserved` that of segments, `nvidia-smi`
shows segments, the CUDA context and what libraries (NCCL, cuDNN) allocate by themselves. (c10/cuda/
CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer, kRoundLarge)
"""

from __future__ import annotations

from collections.abc import Iterable

BLOCK_BYTES = 512
"""kMinBlockSize: every request is rounded up to it."""
SMALL_REQUEST_BYTES = 1 << 20
"""kSmallSize: requests up to it come from the pool of small blocks."""
SMALL_SEGMENT_BYTES = 2 << 20
MIN_LARGE_REQUEST_BYTES = 10 << 20
"""kMinLargeAlloc: smaller requests come from segments of LARGE_SEGMENT_BYTES."""
LARGE_SEGMENT_BYTES = 20 << 20
ROUND_LARGE_BYTES = 2 << 20
"""kRoundLarge: larger requests get a segment of their own, rounded to it."""


def rounded_bytes(request: float) -> int:
    """What a request counts in `memory_allocated`."""
    return -(-int(request) // BLOCK_BYTES) * BLOCK_BYTES


def segment_bytes(request: float) -> int:
    """The segment that the allocator takes from the device where none of its blocks fits the request."""
    size = rounded_bytes(request)
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def least_reserved_bytes(live: Iterable[float]) -> int:
    """Segments that blocks which live at the same time need at least, packed without gaps: small ones share segments
    of 2 MiB, middle ones of 20 MiB, large ones have their own."""
    small = middle = large = 0
    for request in live:
        size = rounded_bytes(request)
        if size <= SMALL_REQUEST_BYTES:
            small += size
        elif size < MIN_LARGE_REQUEST_BYTES:
            middle += size
        else:
            large += segment_bytes(size)
    return (
        -(-small // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
        + -(-middle // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        + large
    )
