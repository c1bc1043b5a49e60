"""What torch's CUDA caching allocator makes of a request: `memory_allocated` counts whole blocks.

    request 1 byte                  counts 512 B
    request 37.1 MiB                counts 37.1 MiB, to the next 512 B
    request 9 MiB, 9 MiB, 1.5 MiB   one segment of 20 MiB: 9, 9 and, as less than 1 MiB would be left over, 2 MiB

A request above 1 MiB takes the smallest free block that holds it, else a new segment: of 20 MiB for requests below
10 MiB, above of the next 2 MiB. What a block has beyond the request becomes a block of its own if it is more than
1 MiB, else it counts with the request, for as long as that lives. So tensors that last, as optimizer states do, count
some per cent more than they ask for.

`torch.cuda.max_memory_allocated` is the peak of counted blocks; `max_memory_reserved` is that of the segments which
hold them, gaps included; `nvidia-smi` also shows the CUDA context and what libraries (NCCL, cuDNN) allocate by
themselves. (c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kLargeBuffer, kMinLargeAlloc, kRoundLarge,
should_split)
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

BLOCK_BYTES = 512
"""kMinBlockSize: every request is rounded up to it."""
SMALL_BYTES = 1 << 20
"""kSmallSize: requests up to it have segments of their own, whose blocks are split exactly."""
SHARED_SEGMENT_BYTES = 20 << 20
"""kLargeBuffer: the segment of requests below kMinLargeAlloc."""
LARGE_REQUEST_BYTES = 10 << 20
"""kMinLargeAlloc: requests from it on have a segment for themselves."""
SEGMENT_STEP_BYTES = 2 << 20
"""kRoundLarge: such segments are multiples of it."""


def rounded_bytes(request: float) -> int:
    """The block that a request asks for."""
    return -(-int(request) // BLOCK_BYTES) * BLOCK_BYTES


class LargeBlocks:
    """Free blocks of large segments, as requests that last take them one after the other."""

    def __init__(self) -> None:
        self._free: list[int] = []

    def take(self, request: float) -> int:
        """Bytes that a request counts."""
        size = rounded_bytes(request)
        if size <= SMALL_BYTES:
            return size
        index = bisect.bisect_left(self._free, size)
        block = self._free.pop(index) if index < len(self._free) else segment_bytes(size)
        rest = block - size
        if rest <= SMALL_BYTES:
            return block
        bisect.insort(self._free, rest)
        return size

    def give_back(self, requests: Iterable[float]) -> None:
        """Segments that were made for these requests are empty again and stay with the allocator."""
        sizes = [size for request in requests if (size := rounded_bytes(request)) > SMALL_BYTES]
        shared = sum(size for size in sizes if size < LARGE_REQUEST_BYTES) // SHARED_SEGMENT_BYTES
        own = [segment_bytes(size) for size in sizes if size >= LARGE_REQUEST_BYTES]
        self._free = sorted([*self._free, *own, *[SHARED_SEGMENT_BYTES] * shared])


def segment_bytes(size: int) -> int:
    """The segment that is made for a block above 1 MiB."""
    if size < LARGE_REQUEST_BYTES:
        return SHARED_SEGMENT_BYTES
    return -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
