"""What of a device's memory a program can use: the context, what the allocator rounds up, what it cannot join again.

`cost_models/usable_memory.py` takes two numbers for that, 750 MiB and 3 %, which nobody has measured here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.cost_models.usable_memory import CONTEXT_BYTES, FRAGMENTATION_FRACTION, usable_bytes
from benchmarks.gpu.stage import Place, Row, attempted
from benchmarks.gpu.timing import free_memory

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the device: all, those that nobody holds, those of tensors, those that the allocator holds for them."""

    total: int
    free: int
    allocated: int
    reserved: int

    @staticmethod
    def of(place: Place) -> Memory:
        """Now. A CPU has no allocator of torch's: what the process holds stands for both."""
        if place.on_cuda:
            free, total = torch.cuda.mem_get_info(place.device)
            return Memory(
                total=total,
                free=free,
                allocated=torch.cuda.memory_allocated(place.device),
                reserved=torch.cuda.memory_reserved(place.device),
            )
        page = os.sysconf("SC_PAGE_SIZE")
        total, held = os.sysconf("SC_PHYS_PAGES") * page, int(Path("/proc/self/statm").read_text().split()[1]) * page
        return Memory(total=total, free=total - held, allocated=held, reserved=held)


def run(
    place: Place, sizes: Sequence[int], product: int, batches: int, largest: int, filled_bytes: int | None
) -> Iterator[Row]:
    """sizes: bytes of single tensors; product: rows of a first kernel; batches: steps whose tensors have changing
    sizes of up to `largest` bytes; filled_bytes: where filling ends (None: when nothing is left)."""
    yield attempted("context", lambda: context(place, product))
    for size in sizes:
        yield attempted(f"rounding of {size}", lambda size=size: rounding(place, size))  # type: ignore[misc]
    yield attempted("changing sizes", lambda: changing_sizes(place, batches, largest))
    free_memory(place.device)
    yield attempted("filled", lambda: filled(place, filled_bytes))


def context(place: Place, rows: int) -> Row:
    """What is gone once a product has run, beside tensors."""
    square = torch.ones(rows, rows, device=place.device, dtype=torch.bfloat16)
    (square @ square).sum().item()
    now = Memory.of(place)
    return {"bytes": now.total - now.free - now.reserved, "predicted_bytes": CONTEXT_BYTES["cuda"], "total": now.total}


def rounding(place: Place, size: int) -> Row:
    """What a tensor of so many bytes takes."""
    before = Memory.of(place).allocated
    tensor = torch.empty(size, dtype=torch.uint8, device=place.device)
    return {"bytes": Memory.of(place).allocated - before, "predicted_bytes": tensor.numel()}


def changing_sizes(place: Place, batches: int, largest: int) -> Row:
    """What is reserved beyond what tensors held, once batches of changing lengths have come and gone."""
    draw = random.Random(0)
    if place.on_cuda:
        torch.cuda.reset_peak_memory_stats(place.device)
    for _ in range(batches):
        part = draw.uniform(0.5, 1.0)
        kept = [torch.empty(int(part * largest * draw.uniform(0.1, 1)), dtype=torch.uint8, device=place.device)
                for _ in range(8)]  # fmt: skip
        del kept[::2]
        kept += [torch.empty(int(part * largest * draw.uniform(0.1, 1)), dtype=torch.uint8, device=place.device)
                 for _ in range(4)]  # fmt: skip
    now = Memory.of(place)
    allocated = torch.cuda.max_memory_allocated(place.device) if place.on_cuda else now.allocated
    reserved = torch.cuda.max_memory_reserved(place.device) if place.on_cuda else now.reserved
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "fraction": 1 - allocated / reserved,
        "predicted_fraction": FRAGMENTATION_FRACTION["cuda"],
    }


def filled(place: Place, limit: int | None) -> Row:
    """How many bytes of tensors fit beside the context, against what plans may fill."""
    total = Memory.of(place).total
    chunk = CHUNK_BYTES if limit is None else limit // 2
    held: list[torch.Tensor] = []
    try:
        while limit is None or len(held) * chunk < limit:
            held.append(torch.empty(chunk, dtype=torch.uint8, device=place.device))
    except torch.OutOfMemoryError:
        pass
    return {"bytes": len(held) * chunk, "planned_bytes": usable_bytes(total, "cuda"), "total": total}
