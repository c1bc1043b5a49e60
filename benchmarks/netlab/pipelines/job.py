"""What every rank does: train under each plan in turn, step by step, and look at clocks and at the links' counters.

python -m benchmarks.netlab.pipelines.job SETTING FOLDER STEPS       FOLDER/*.plan; rank 0 writes results.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from benchmarks.netlab.counters import read_counters
from benchmarks.netlab.pipelines.settings import LEARNING_RATE, SETTINGS

RESULTS = "results.json"
WARM_UP_STEPS = 2


def main(setting: str, folder: Path, steps: int) -> None:
    """Interleaved steps of all plans; per plan and step: seconds of the slowest rank, loss, bytes per node."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = {path.stem: _Trained(setting, path) for path in sorted(folder.glob("*.plan"))}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in trained}
    for _ in range(WARM_UP_STEPS + steps):
        for name, each in trained.items():
            rows[name].append(each.step())
    if dist.get_rank() == 0:
        (folder / RESULTS).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


class _Trained:
    """A model under one plan."""

    def __init__(self, setting: str, plan: Path) -> None:
        model, self.inputs = SETTINGS[setting].model_and_inputs()
        self.module = autopar.compile(model, self.inputs, optimizer=torch.optim.SGD, plan=plan)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)

    def step(self) -> dict[str, Any]:
        """One step; all ranks begin together."""
        dist.barrier()
        before = _payload()
        dist.barrier()
        begin = time.perf_counter()
        loss = self.module(**self.inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = [0.0] * dist.get_world_size()
        mine = time.perf_counter() - begin
        dist.barrier()
        after = _payload()
        dist.all_gather_object(found, mine)
        sent = [sum(b) - sum(a) for a, b in zip(before, after, strict=True)]
        return {
            "seconds": max(found),
            "loss": float(loss.detach()),
            "sent_bytes": sent,
        }


def _payload() -> list[list[int]]:
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    payload: list[list[int]] = read_counters(Path(os.environ["AUTOPAR_NETLAB_COUNTERS"]), nodes).payload.tolist()
    return payload


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
