"""CPU seconds of causal attention whose queries are cut by sequence, beside its share of the whole and the price.

    python -m benchmarks.cut_attention [RESULT.json]

A rank of n holds one run of queries and all keys: rank r sees (2 r + 1) / n**2 of the pairs. `of_share`: its seconds by
that share of the seconds of the whole attention, measured in turn in one process with one thread. The price is that of
the last rank, which has most to do; predicted stands on this machine's rate of products, measured in the same run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from autopar.cost_models.operator_costs import operator_seconds
from autopar.cost_models.operator_sizes import AttentionSizes, flops_of
from autopar.hardware.cluster import Cluster
from autopar.ops.attention_formulas import ScoreOptions
from autopar.ops.attention_math import attend, attend_backward
from benchmarks.results import write_results

SHAPES = ((2, 8, 2048, 64), (2, 8, 1024, 64), (1, 4, 4096, 128))
"""(batch, heads, tokens, head size), fp32."""
PARTS = (2, 4)
TIMES, PRODUCT = 5, 1024


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's attention and that of all: CPU seconds forward and backward."""

    rank: int
    forward: float
    backward: float


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Median of `TIMES` calls after one that warms up."""
    call()
    found = []
    for _ in range(TIMES):
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return median(found)


def measured(rank: int, parts: int, tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> Part:
    """Attention of the rank-th of `parts` runs of queries. tensors: query, key, value, gradient of the output."""
    query, key, value, grad = tensors
    length = query.shape[2] // parts
    rows = slice(rank * length, (rank + 1) * length)
    options = ScoreOptions(is_causal=True, rows=((rows.start, length),), keys=((0, key.shape[2]),))
    own, own_grad = (x[:, :, rows].contiguous() for x in (query, grad))
    out, sums = attend(own, key, value, options)
    return Part(
        rank,
        cpu_seconds(lambda: attend(own, key, value, options)),
        cpu_seconds(lambda: attend_backward(own_grad, own, key, value, out, sums, options)),
    )


def predicted(shape: tuple[int, int, int, int], parts: int, backward: bool, flops_per_second: float) -> float:
    """Seconds of the last of `parts` ranks."""
    batch, heads, tokens, size = shape
    device = replace(Cluster.parse("4 cpu").device, flops_per_second={"float32": flops_per_second}, operators=())
    sizes = AttentionSizes(
        batch=batch, heads=heads, queries_per_key=1, queries=tokens // parts, keys=tokens, qk_dim=size, v_dim=size,
        causal=True, backward=backward,
    )  # fmt: skip
    return float(
        operator_seconds(device, flops=flops_of(sizes), bytes_moved=0.0, dtype="float32", kind="attention",
                         kernels=0, sizes=sizes)
    )  # fmt: skip


def rows_of(shape: tuple[int, int, int, int], flops_per_second: float) -> list[dict[str, Any]]:
    """The whole attention of a shape, then every rank of every number of parts."""
    torch.manual_seed(0)
    tensors = tuple(torch.randn(shape) for _ in range(4))
    whole = measured(0, 1, (tensors[0], tensors[1], tensors[2], tensors[3]))
    rows = [_row(shape, 1, whole, whole, flops_per_second)]
    for parts in PARTS:
        found = [measured(rank, parts, (tensors[0], tensors[1], tensors[2], tensors[3])) for rank in range(parts)]
        rows += [_row(shape, parts, part, whole, flops_per_second) for part in found]
    return rows


def _row(shape: tuple[int, int, int, int], parts: int, part: Part, whole: Part, rate: float) -> dict[str, Any]:
    share = (2 * part.rank + 1) / parts**2
    row: dict[str, Any] = {"shape": list(shape), "parts": parts, "rank": part.rank, "share_of_pairs": share}
    for name, seconds, all_seconds in (
        ("forward", part.forward, whole.forward),
        ("backward", part.backward, whole.backward),
    ):
        row[name] = {"seconds": round(seconds, 5), "of_share": round(seconds / all_seconds / share, 3)}
        if part.rank == parts - 1:
            expected = predicted(shape, parts, name == "backward", rate)
            row[name] |= {
                "predicted_seconds": round(expected, 5),
                "predicted_of_measured": round(expected / seconds, 3),
            }
    return row


def main() -> None:
    """Measure, print, and write where asked."""
    torch.set_num_threads(1)
    left, right = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)
    rate = 2 * PRODUCT**3 / cpu_seconds(lambda: left @ right)
    rows = [row for shape in SHAPES for row in rows_of(shape, rate)]
    table = Table(
        "shape", "rank", "forward s", "of share", "predicted", "backward s", "of share", "predicted", box=None
    )
    for row in rows:
        cells = [
            str(row[name].get(key, "")) for name in ("forward", "backward")
            for key in ("seconds", "of_share", "predicted_of_measured")
        ]  # fmt: skip
        table.add_row(str(tuple(row["shape"])), f"{row['rank']} of {row['parts']}", *cells)
    Console().print(table)
    last = [row[name] for row in rows if row["rank"] == row["parts"] - 1 for name in ("forward", "backward")]
    summary = {
        "product_flops_per_second": round(rate),
        "of_share_of_last_ranks_at_most": max(each["of_share"] for each in last),
        "of_share_of_any_rank_at_most": max(row[name]["of_share"] for row in rows for name in ("forward", "backward")),
        "predicted_of_measured": [min(e["predicted_of_measured"] for e in last),
                                  max(e["predicted_of_measured"] for e in last)],
    }  # fmt: skip
    Console().print_json(data=summary)
    if len(sys.argv) > 1:
        command = ["python", "-m", "benchmarks.cut_attention", *sys.argv[1:]]
        write_results(Path(sys.argv[1]), {"command": command, "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
