"""CPU seconds of a search with an axis cp, beside one with an axis tp of the same size.

    python -m benchmarks.context_parallelism.planner_seconds [RESULT.json]

One process asks in turn, behind a question that nobody counts (it captures the model); medians of `TIMES` rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

import autopar
from autopar.timing import cpu_seconds
from benchmarks.models import workload
from benchmarks.results import write_results

COMMAND = "python -m benchmarks.context_parallelism.planner_seconds RESULT.json"
TIMES = 3
CASES = {"gpt2": (8, 1024), "llama3-8b": (8, 8192)}
"""Workload -> batch, tokens."""
CLUSTER = "8 H100-SXM"
PAIRS: tuple[tuple[Mapping[str, int], Mapping[str, int]], ...] = (
    ({"dp_shard": 2, "tp": 4}, {"dp_shard": 2, "cp": 4}),
    ({"tp": 8}, {"cp": 8}),
)


def rows(name: str) -> list[dict[str, Any]]:
    """Of one workload: a row a pair of meshes."""
    batch, tokens = CASES[name]
    model, inputs = workload(name, batch=batch, seq=tokens)
    planner = autopar.Planner(model, inputs, cluster=CLUSTER, optimizer=torch.optim.AdamW)
    planner.plan(mode="fast", dims={"dp_shard": 8})
    found = []
    for without, within in PAIRS:
        spent: dict[str, list[float]] = {"tp": [], "cp": []}
        for _ in range(TIMES):
            for axis, dims in (("tp", without), ("cp", within)):
                began = cpu_seconds()
                planner.plan(mode="fast", dims=dims)
                spent[axis].append(cpu_seconds() - began)
        tp, cp = median(spent["tp"]), median(spent["cp"])
        found.append({
            "workload": name, "batch": batch, "tokens": tokens, "cluster": CLUSTER, "tp": dict(without),
            "cp": dict(within), "tp_cpu_seconds": round(tp, 2), "cp_cpu_seconds": round(cp, 2),
            "ratio": round(cp / tp, 3),
        })  # fmt: skip
    return found


def main() -> None:
    """Print all rows, and keep them where a file is named."""
    console = Console(width=160)
    found = []
    for name in CASES:
        for row in rows(name):
            found.append(row)
            console.print(row, highlight=False)
    if len(sys.argv) > 1:
        write_results(Path(sys.argv[1]), {"command": COMMAND, "rows": found})


if __name__ == "__main__":
    main()
