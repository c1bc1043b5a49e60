"""Collectives that are on their way together, alone and beside computation, on an emulated network.

    python -m benchmarks.netlab --preset two-by-two -- python -m benchmarks.netlab.beside OUT.json

Every rank runs this file. So many collectives are started one after the other, as gradients are in backward, and
awaited in a thread of their own, while products are computed or not. Seconds of one, until the last has ended; the
mean over ranks, the median of runs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.calibration.measuring_worker import COLLECTIVES
from autopar.runtime.collectives.host_graphs import wait

KINDS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = (1 << 16, 1 << 18, 1 << 20)
"""Bytes of the full buffer."""
TOGETHER = (1, 8)
RUNS = 5
WORK_ROWS = 256
"""Rows of a product: a millisecond of a core."""


def main(output: Path) -> None:
    """Measure all kinds, sizes and numbers; rank 0 writes the rows and prints them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [_row(kind, size, count) for kind in KINDS for size in SIZES for count in TOGETHER]
    if dist.get_rank() == 0:
        output.write_text(json.dumps({"rows": rows}, indent=1))
        for row in rows:
            print("{kind:15s} {bytes:8d} x {together}  alone {alone:.4f} s  beside {beside:.4f} s".format(**row))
    dist.barrier()
    dist.destroy_process_group()


def _row(kind: str, size: int, count: int) -> dict[str, Any]:
    pairs = [(_seconds(kind, size, count, False), _seconds(kind, size, count, True)) for _ in range(RUNS)]
    medians = torch.tensor([statistics.median(each) / count for each in zip(*pairs, strict=True)])
    dist.all_reduce(medians)
    alone, beside = (medians / dist.get_world_size()).tolist()
    return {"kind": kind, "bytes": size, "together": count, "alone": alone, "beside": beside}


def _seconds(kind: str, size: int, count: int, computes: bool) -> float:
    """Until all have ended."""
    group, matrix = dist.group.WORLD, torch.randn(WORK_ROWS, WORK_ROWS)
    assert group is not None
    buffers = [torch.zeros(size // 4) for _ in range(count)]
    dist.barrier()
    torch.mm(matrix, matrix)
    begin = time.perf_counter()
    started = [COLLECTIVES[kind](buffer, group.size(), group.group_name) for buffer in buffers]

    def wait_for_all() -> float:
        for one in started:
            wait(one)
        return time.perf_counter()

    with ThreadPoolExecutor(1) as other:
        ended = other.submit(wait_for_all)
        while computes and not ended.done():
            torch.mm(matrix, matrix)
        return ended.result() - begin


if __name__ == "__main__":
    main(Path(sys.argv[1]))
