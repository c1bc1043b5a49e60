"""The same function on every device of this machine, one forked process each, in one process group.

    rows = on_ranks(place, 2, measure, sizes)       # what rank 0 returned
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.gpu.stage import Place

Function = Callable[..., Any]


def num_ranks(place: Place, rehearsed: int) -> int:
    """All devices; in a rehearsal so many processes. Counts by the driver, without a context."""
    return torch.cuda.device_count() if place.on_cuda else rehearsed


def on_ranks(place: Place, ranks: int, function: Function, *arguments: Any) -> Any:
    """Call function(place, *arguments) on all ranks. Raises where one of them fails, with its traceback."""
    with tempfile.TemporaryDirectory(prefix="autopar-ranks-") as folder:
        given = (place, ranks, Path(folder), function, arguments)
        start_processes(_rank, args=given, nprocs=ranks, start_method="fork")  # type: ignore[no-untyped-call]
        return json.loads((Path(folder) / "found").read_text())


def _rank(rank: int, place: Place, ranks: int, folder: Path, function: Function, arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    device = torch.device("cuda", rank) if place.on_cuda else place.device
    if place.on_cuda:
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if place.on_cuda else "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks,
        device_id=device if place.on_cuda else None,
    )  # fmt: skip
    found = function(replace(place, device=device), *arguments)
    if rank == 0:
        (folder / "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def slowest(seconds: float, device: torch.device) -> float:
    """The largest number of any rank."""
    number = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return float(number)
