"""What equal bits on any number of processes cost: steps with `deterministic=8` beside steps without.

    python -m benchmarks.cost_of_equal_bits [--steps N] [RESULT.json]          # exits with 1 where bits differ

A small GPT on 1, 2 and 4 gloo processes of this machine with one thread each, under DDP and ZeRO-3. Both modules take
their steps in turn. A row has the median over steps of the slowest rank's seconds and the CPU seconds of all ranks
together, optimizer among them, and a hash of the weights behind all steps: one for all rows with `deterministic=8`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from benchmarks.faults.__main__ import commit
from benchmarks.results import write_results
from benchmarks.workers import Pool

SHARDS = 8
BATCH, SEQUENCE, VOCABULARY = 16, 64, 512
SIZES = GPTConfig(vocabulary=VOCABULARY, positions=SEQUENCE, width=64, heads=4, layers=1)
PLANS = {None: "one process", "dp_replicate": "DDP", "dp_shard": "ZeRO-3"}
CASES = ((1, None), (2, "dp_replicate"), (4, "dp_shard"))


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator) for _ in range(2))
    return tokens, labels


def steps_in_turn(axis: str | None, processes: int, steps: int) -> list[dict[str, Any]]:
    """Job of a worker: seconds of every step, without and with equal bits."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    trained = []
    for deterministic in (False, SHARDS):
        torch.manual_seed(0)
        dims = None if axis is None else {axis: processes}
        module = autopar.compile(
            GPT(SIZES), _batch(0), optimizer=torch.optim.AdamW, dims=dims, mode="fast", deterministic=deterministic
        )
        trained.append((module, torch.optim.AdamW(module.parameters(), lr=1e-3)))
        rows.append({
            "deterministic": deterministic, "micro_batches": module.plan.micro_batches,
            "predicted_step_s": module.plan.predicted.step_seconds, "seconds": [], "cpu_seconds": [],
        })  # fmt: skip
    for step in range(steps + 1):
        for row, (module, optimizer) in zip(rows, trained, strict=True):
            if dist.is_initialized():
                dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            module(*_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step:  # the first one warms up
                row["seconds"].append(time.perf_counter() - begin)
                row["cpu_seconds"].append(time.process_time() - cpu)
    for row, (module, _) in zip(rows, trained, strict=True):
        digest = hashlib.sha256()
        for _, weight in sorted(module.full_state_dict().items()):
            digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
        row["weights"] = digest.hexdigest()[:16]
    return rows


def measure(steps: int) -> list[dict[str, Any]]:
    """One row per number of processes and plan, without and with; a finished case is printed at once."""
    pool, rows = Pool(), []
    try:
        for processes, axis in CASES:
            ranks = pool.run(
                "benchmarks.cost_of_equal_bits:steps_in_turn",
                world_size=processes, timeout=600.0, axis=axis, processes=processes, steps=steps,
            )  # fmt: skip
            made = [_joined(found, processes, axis) for found in zip(*ranks, strict=True)]
            ratios = {name: made[1][name] / made[0][name] for name in ("step_s", "cpu_s")}
            rows += [made[0], {**made[1], **{f"{name}_over_plain": ratio for name, ratio in ratios.items()}}]
            print(json.dumps(rows[-2:]), flush=True)
    finally:
        pool.close()
    return rows


def _joined(found: tuple[dict[str, Any], ...], processes: int, axis: str | None) -> dict[str, Any]:
    slowest = [max(step) for step in zip(*(rank["seconds"] for rank in found), strict=True)]
    together = [sum(step) for step in zip(*(rank["cpu_seconds"] for rank in found), strict=True)]
    same = {name: found[0][name] for name in ("deterministic", "micro_batches", "predicted_step_s", "weights")}
    return {
        "processes": processes, "plan": PLANS[axis], **same,
        "step_s": statistics.median(slowest), "cpu_s": statistics.median(together),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("result", nargs="?", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.steps)
    hashes = {row["weights"] for row in rows if row["deterministic"]}
    print(f"{len(hashes)} hash of the weights under deterministic={SHARDS}")
    if arguments.result is not None:
        command = f"python -m benchmarks.cost_of_equal_bits --steps {arguments.steps}"
        write_results(arguments.result, {"commit": commit(), "command": command, "rows": rows})
    return int(len(hashes) > 1)


if __name__ == "__main__":
    sys.exit(main())
