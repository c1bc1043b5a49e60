"""What a new sequence length costs a loop whose lengths are drawn from 40 values, and whether it trains as it should.

    python -m benchmarks.new_lengths [--steps N] [RESULT.json]          # exits with 1 where the losses differ by 1e-5

A small GPT on 1 and on 2 gloo processes of this machine with one thread each, beside the plain model on the same
batches: SGD, whose steps do not blow up rounding. A row has, over the calls that met a new length behind the first two,
the median and the worst CPU seconds of a process and seconds on the clock, and the median of each phase; beside them
what a call of a known length takes. `load_average` is that of the machine when it began; on one process and an idle
machine seconds on the clock are CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.timing import PhaseTimes
from benchmarks.faults.__main__ import commit
from benchmarks.results import write_results
from benchmarks.workers import Pool

BATCH, VOCABULARY = 8, 256
LENGTHS = tuple(range(24, 104, 2))
"""40 values."""
SIZES = GPTConfig(vocabulary=VOCABULARY, positions=128, width=64, heads=4, layers=2)
CASES: tuple[tuple[int, Mapping[str, int] | None], ...] = ((1, None), (2, {"dp_replicate": 2}), (2, {"tp": 2}))
PHASES: Mapping[str, tuple[str, ...]] = {
    "capture": ("capture",),
    "plan": ("price", "solve", "predict"),
    "lower": ("lower",),
    "emit": ("emit",),
}
TOLERANCE = 1e-5


def drawn_lengths(steps: int) -> list[int]:
    """Every length comes at least once."""
    generator = random.Random(0)
    more = generator.choices(LENGTHS, k=max(0, steps - len(LENGTHS)))
    drawn = [*LENGTHS, *more]
    generator.shuffle(drawn)
    return drawn


def _batch(step: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(0, VOCABULARY, (BATCH, length), generator=generator) for _ in range(2))
    return tokens, labels


def plain_losses(lengths: Sequence[int]) -> Iterator[float]:
    """Of the plain model, step by step."""
    torch.manual_seed(0)
    model = GPT(SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, length in enumerate(lengths):
        loss = model(*_batch(step, length))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def train(lengths: Sequence[int], dims: Mapping[str, int] | None) -> list[dict[str, Any]]:
    """Job of a worker: what every call of the loop cost."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = autopar.compile(GPT(SIZES), _batch(0, lengths[0]), optimizer=torch.optim.SGD, dims=dims, mode="fast")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rows = []
    for step, (length, expected) in enumerate(zip(lengths, plain_losses(lengths), strict=True)):
        with PhaseTimes() as times:
            begin, cpu = time.perf_counter(), time.process_time()
            loss = module(*_batch(step, length))
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        spent = {name: sum(_cpu(times, part) for part in parts) for name, parts in PHASES.items()}
        rows.append({
            "length": length, "is_new": "capture" in times.phases, "planned": "solve" in times.phases,
            "seconds": seconds, "cpu_seconds": cpu_seconds, "phases": spent,
            "loss_error": abs(loss.item() - expected) / abs(expected),
        })  # fmt: skip
    return rows


def _cpu(times: PhaseTimes, name: str) -> float:
    spent = times.phases.get(name)
    return 0.0 if spent is None else spent.cpu_seconds


def measure(steps: int) -> list[dict[str, Any]]:
    """One row per number of processes and plan; a finished one is printed at once."""
    lengths, pool, rows = drawn_lengths(steps), Pool(size=2), []
    try:
        for processes, dims in CASES:
            ranks = pool.run(
                "benchmarks.new_lengths:train", world_size=processes, timeout=900.0, lengths=lengths, dims=dims
            )
            rows.append({"processes": processes, "dims": dims, **_summary([call for rank in ranks for call in rank])})
            print(json.dumps(rows[-1]), flush=True)
    finally:
        pool.close()
    return rows


def _summary(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the calls of all ranks, in their order per rank."""
    made = [call for call in calls if call["is_new"]]
    second = next(call["length"] for call in made)  # the first one was made by compile
    later = [call for call in made if call["length"] != second]
    known = [call for call in calls if not call["is_new"]]
    return {
        "calls": len(calls), "new_lengths": len(later), "planned": sum(call["planned"] for call in later),
        "loss_error": max(call["loss_error"] for call in calls),
        "new_cpu_s": _spread(later, "cpu_seconds"), "new_s": _spread(later, "seconds"),
        "phases_cpu_s": {n: statistics.median(call["phases"][n] for call in later) for n in PHASES},
        "known_cpu_s": _spread(known, "cpu_seconds"),
    }  # fmt: skip


def _spread(calls: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    values = [call[name] for call in calls]
    return {"median": statistics.median(values), "worst": max(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("result", nargs="?", type=Path)
    arguments = parser.parse_args()
    load_average = os.getloadavg()[0]
    rows = measure(arguments.steps)
    if arguments.result is not None:
        command = f"python -m benchmarks.new_lengths --steps {arguments.steps}"
        content = {"commit": commit(), "command": command, "load_average": load_average, "rows": rows}
        write_results(arguments.result, content)
    return int(max(row["loss_error"] for row in rows) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
