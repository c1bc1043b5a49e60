"""Seconds of a step, products whole and in chunks beside the collectives of their rows
(`passes/overlap/chunk_products.py`).

    python -m benchmarks.product_chunks [--steps N] [RESULT.json]

An MLP under tensor parallelism on four gloo processes of this machine. The plans of all numbers of chunks take their
steps in turn; a row has the median over steps of the slowest rank's seconds, and how far its gradients are from the
plain model's. Local processes share memory and processors, so there is next to no wire to hide: this says what chunks
cost, not what they gain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.ops.row_chunks import rows_joined
from autopar.plans.parallel_plan import Plan
from autopar.runtime.kernels.named_calls import NamedGraph
from autopar.runtime.step.whole_step import WholeStep
from benchmarks.agreement import compare, loss_of, reference
from benchmarks.results import write_results
from benchmarks.workers import Pool

RANKS, ROWS, WIDTH = 4, 2048, 256
CHUNKS = (1, 2, 4)
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


class Mlp(nn.Module):
    """Column-parallel, then row-parallel. forward(x (B, W), y (B, W)) -> mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def steps_in_turn(steps: int) -> list[dict[str, Any]]:
    """Job of a worker: the seconds of every step per number of chunks."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, inputs = Mlp(), {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}
    expected = reference(model, inputs)
    plan = autopar.compile(Mlp(), inputs, dims={"tp": RANKS}, mode="fast").plan
    assert isinstance(plan, Plan)
    modules: dict[int, nn.Module] = {}
    rows: list[dict[str, Any]] = []
    for chunks in CHUNKS:
        cut = replace(plan, bucket_bytes={}, product_chunks=dict.fromkeys(KINDS, chunks))
        own = Mlp()
        own.load_state_dict(model.state_dict())
        modules[chunks] = module = autopar.compile(own, inputs, plan=cut)
        agreement = compare(module, inputs, expected)
        step, _ = module.step_for((), inputs)
        assert isinstance(step, WholeStep)
        graphs = [call.graph_module.graph for call in (step.forward, step.backward) if isinstance(call, NamedGraph)]
        cuts = sum(node.target is rows_joined for graph in graphs for node in graph.nodes)
        rows.append({
            "chunks": chunks, "products_cut": cuts, "gradient_error": agreement.gradient_error,
            "agrees": agreement.agrees,
        })  # fmt: skip
    seconds: dict[int, list[float]] = {chunks: [] for chunks in CHUNKS}
    for _ in range(steps):
        for chunks in CHUNKS:
            dist.barrier()
            start = time.perf_counter()
            loss_of(modules[chunks](**inputs)).backward()  # type: ignore[no-untyped-call]
            seconds[chunks].append(time.perf_counter() - start)
    return [{**row, "seconds": seconds[row["chunks"]]} for row in rows]


def measure(steps: int) -> list[dict[str, Any]]:
    """One row per number of chunks."""
    pool = Pool()
    try:
        ranks = pool.run("benchmarks.product_chunks:steps_in_turn", world_size=RANKS, timeout=300.0, steps=steps)
    finally:
        pool.close()
    rows = []
    for found in zip(*ranks, strict=True):
        slowest = [max(step) for step in zip(*(rank["seconds"] for rank in found), strict=True)]
        rows.append({
            "chunks": found[0]["chunks"],
            "products_cut": found[0]["products_cut"],
            "step_s": statistics.median(slowest),
            "gradient_error": max(rank["gradient_error"] for rank in found),
            "agrees": all(rank["agrees"] for rank in found),
        })  # fmt: skip
    return [{**row, "over_whole": row["step_s"] / rows[0]["step_s"]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("result", nargs="?", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.steps)
    print(json.dumps(rows, indent=1))
    if arguments.result is not None:
        write_results(arguments.result, {"command": "python -m benchmarks.product_chunks", "rows": rows})


if __name__ == "__main__":
    main()
