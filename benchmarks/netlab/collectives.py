"""Predicted beside measured: what a profile says of collectives on an emulated network, and what they take and send.

    python -m benchmarks.netlab --preset flat-200mbit -- python -m autopar profile --force
    python -m benchmarks.netlab --preset flat-200mbit -- python -m benchmarks.netlab.collectives OUT.json

Every rank runs this file. Sizes lie between those of the profile; a collective is timed between small products, as in
a program, in another process than the profile was. Bytes are those of TCP payload on the links, beside `sent_bytes`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from autopar.cost_models.collective_costs import CollectiveKind, collective_seconds
from autopar.cost_models.gloo import sent_bytes
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.runtime.calibration.measure_job import collective, shift
from benchmarks.netlab.counters import read_counters

SIZES = (1 << 12, 1 << 15, 3 << 17, 3 << 20)
"""Bytes of the full buffer."""
CALLS = 7
WORK_ROWS = 256
KINDS = tuple(kind for kind in get_args(CollectiveKind) if kind != "broadcast")
"""Those that compiled programs run, and sends to a neighbour."""


def main(output: Path) -> None:
    """Measure all kinds and sizes; rank 0 writes the rows and prints them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = Cluster.detect()
    topology = GroupTopology.of(cluster, (dist.get_world_size(),), (0,))
    rows = [_row(kind, size, cluster, topology) for kind in KINDS for size in SIZES]
    if dist.get_rank() == 0:
        output.write_text(json.dumps({"profile": cluster.profile, "rows": rows}, indent=1))
        for row in rows:
            print("{kind:15s} {bytes:8d}  {measured:.5f} s  {predicted:.5f} s".format(**row))
    dist.barrier()
    dist.destroy_process_group()


def _row(kind: CollectiveKind, size: int, cluster: Cluster, topology: GroupTopology) -> dict[str, Any]:
    world = dist.group.WORLD
    assert world is not None
    call = partial(shift, world) if kind == "neighbours" else partial(collective, kind, world)
    seconds, sent = _measure(partial(call, size))
    _, across = sent_bytes(kind, size, topology.nodes, topology.ranks_per_node)
    return {
        "kind": kind,
        "bytes": size,
        "measured": seconds,
        "predicted": float(collective_seconds(kind, size, topology, cluster)),
        "sent_bytes": sent / dist.get_world_size(),
        "predicted_sent_bytes": across,
    }


def _measure(call: Callable[[], None]) -> tuple[float, float]:
    """(median seconds of the slowest rank beyond a product's, bytes that all nodes sent per call)."""
    matrix = torch.randn(WORK_ROWS, WORK_ROWS)

    def product_and_call() -> None:
        torch.mm(matrix, matrix)
        call()

    both, alone = [], []
    call()
    dist.barrier()
    for _ in range(CALLS):
        alone.append(_slowest(lambda: torch.mm(matrix, matrix)))
        both.append(_slowest(product_and_call))
    dist.barrier()
    before = _sent()
    dist.barrier()  # nobody sends before rank 0 has looked
    for _ in range(CALLS):
        call()
    dist.barrier()
    after = _sent()
    return statistics.median(both) - statistics.median(alone), (after - before) / CALLS


def _slowest(call: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _sent() -> float:
    nodes = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    return float(read_counters(Path(os.environ["AUTOPAR_NETLAB_COUNTERS"]), nodes).payload.sum())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
