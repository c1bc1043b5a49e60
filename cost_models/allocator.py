"""What torch's CUDA caching allocator makes of a request: `memory_allocated` counts whole blocks.

    request 1 byte                  counts 512 B
    request 37.1 MiB                counts 37.1 MiB, to the next 512 B

`torch.cuda.max_memory_allocated` is the peak of rounded requests; `max_memory_reserved` is that of the segments which
hold them, gaps included; `nvidia-smi` also shows the CUDA context and what libraries (NCCL, cuDNN) allocate by
themselves. (c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize)
"""

from __future__ import annotations

BLOCK_BYTES = 512
"""kMinBlockSize: every request is rounded up to it."""


def rounded_bytes(request: float) -> int:
    """What a request counts in `memory_allocated`."""
    return -(-int(request) // BLOCK_BYTES) * BLOCK_BYTES
