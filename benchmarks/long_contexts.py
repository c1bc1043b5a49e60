"""The longest sequences that fit: `python -m benchmarks.long_contexts [--only 8] [--run] [--output FILE]`.

`--way ring --tokens 1310720` asks for that length alone. Rows of the same question in FILE are replaced, others stay;
each row has its commit and date.

One sequence of Llama-3-8B (bf16, AdamW, without its logits) over 8 and 32 H100, context parallelism over all of them,
by each way of attention and as the planner chooses: the longest length that has a plan (doubled, then in halves of the
last doubling), its step, tokens per second and device, and peak. Recomputation, the loss in chunks, MLPs in tiles and
sharded states are the planner's. `--run`: the program of the busiest rank of the longest plan runs on fake CUDA
tensors, which counts its bytes again.

`--offload all` lets saved values and parameters wait in the memory of the host; rows then say how many bytes do:

    python -m benchmarks.long_contexts --offload all --only 1 --tokens 524288 --run --output FILE
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from autopar.errors import AutoparError
from autopar.graphs.copy_nodes import copy_direction
from autopar.passes.lowering.chain import lowered_step
from autopar.planner.memory.resident_states import resident_states
from autopar.plans.busiest_rank import busiest_place
from autopar.plans.plan_value import HOST
from autopar.request.offload import OFFLOADS
from autopar.simulation.step_program import StepProgram
from benchmarks.fake_cuda.cases import OPTIMIZER, Case, asked_step, planned_of
from benchmarks.fake_cuda.checks import faults
from benchmarks.fake_cuda.rank_step import run_rank
from benchmarks.faults.__main__ import commit
from benchmarks.models import LossOnly, workload
from benchmarks.results import write_results

KIB_TOKENS = 1024
CLUSTERS = {"1 H100-SXM": 128 * KIB_TOKENS, "8 H100-SXM": 256 * KIB_TOKENS, "4x8 H100-SXM": 1024 * KIB_TOKENS}
"""Cluster -> the first length that is tried."""
WAYS = (None, "ring", "ulysses", "gather")
STEPS = 2
"""How often the last doubling is halved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question of the benchmark. way: of attention; None: freely chosen. offload, mode: as in a request."""

    cluster: str
    way: str | None
    offload: str | None = None
    mode: str = "fast"
    layers: int | None = None

    @property
    def devices(self) -> int:
        """Ranks of the axis cp."""
        first = self.cluster.split()[0]
        nodes, _, each = first.rpartition("x")
        return int(nodes or 1) * int(each)

    def case(self, tokens: int) -> Case:
        """One sequence of so many tokens."""
        asked: dict[str, Any] = {"mode": self.mode, "offload": self.offload}
        if self.devices > 1:
            asked |= {"dims": {"cp": self.devices}, "cp": self.way}
        return Case(name=f"{tokens} tokens", build=partial(_model, tokens, self.layers), cluster=self.cluster,
                    ranks=(0,), asked=asked)  # fmt: skip


def _model(tokens: int, layers: int | None) -> Any:
    model, inputs = workload("llama3-8b", batch=1, seq=tokens)
    if layers is not None:
        decoder: Any = model.model
        decoder.layers = decoder.layers[:layers]
    return LossOnly(model).train(), inputs


def longest(asked: Asked, first: int) -> Iterator[dict[str, Any]]:
    """A row per length that was tried."""
    tokens, fits = first, 0
    while True:
        row = _row(asked, tokens)
        yield row
        if "error" in row:
            break
        fits, tokens = tokens, 2 * tokens
    if not fits:
        return
    width = fits
    for _ in range(STEPS):
        width //= 2
        row = _row(asked, fits + width)
        yield row
        if "error" not in row:
            fits += width


def _row(asked: Asked, tokens: int) -> dict[str, Any]:
    began = time.process_time()
    said: dict[str, Any] = {"cluster": asked.cluster, "way": asked.way or "free", "tokens": tokens, **made()}
    if asked.offload:
        said |= {"offload": asked.offload, "mode": asked.mode}
    try:
        step = _planned(asked, tokens)
    except AutoparError as error:
        return {**said, "error": str(error).splitlines()[0][:300], "cpu_seconds": round(time.process_time() - began, 1)}
    plan = step.plan
    kinds = Counter(
        (chosen.implementation, *map(str, chosen.axes))
        for name, chosen in plan.operators.items()
        if name.endswith("/attention#0")
    )
    seconds = plan.predicted.step_seconds
    return {
        **said,
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)),
        "step_seconds": round(seconds, 3),
        "tokens_per_second_and_device": round(tokens / seconds / asked.devices, 1),
        "exposed_communication_seconds": round(plan.predicted.exposed_communication_seconds, 3),
        "peak_bytes": plan.predicted.peak_bytes,
        **(waiting(step) if plan.waits_on_host else {}),
        "attention": {" ".join(kind): count for kind, count in kinds.items()},
        "recomputed": sum(chosen.recompute for chosen in plan.operators.values()),
        "operators": len(plan.operators),
        "kernels_of_ours": list(plan.kernels),
        "compared": [note for note in plan.notes if note.startswith("memory is short: ")],
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def waiting(step: StepProgram) -> dict[str, Any]:
    """What waits on the host, of one device: bytes of parameters with gradients and states, and of saved values."""
    lowered = lowered_step(step.micro or step.program, step.plan, 0).only
    states = resident_states(lowered.program, step.state_bytes, step.cluster.device)
    saved = sum(
        math.prod(node.meta["local_shape"]) * node.meta["dtype"].itemsize
        for node in lowered.partition.forward.graph.nodes
        if copy_direction(node) == "to_host"
    )
    return {
        "host_bytes": {"parameters": states.host, "saved": saved},
        "on_host": {
            "parameters": sum(each.stored_on == HOST for each in step.plan.parameters.values()),
            "operators": len(step.plan.saved_on_host),
        },
    }


def made() -> dict[str, str]:
    """Commit and date of a row."""
    return {"commit": commit(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


@lru_cache(maxsize=1)
def _planned(asked: Asked, tokens: int) -> StepProgram:
    """The last one is kept for its run."""
    case = asked.case(tokens)
    return asked_step(case, *case.build())


def on_fake_cuda(asked: Asked, tokens: int) -> dict[str, Any]:
    """What the busiest rank holds of a plan, planned and run."""
    step = _planned(asked, tokens)
    rank = busiest_place(step.plan, step.plan.mesh, step.program)
    record = run_rank(step.micro or step.program, step.plan, OPTIMIZER, rank)
    planned = planned_of(step, record, rank)
    return {
        "rank": rank,
        "peak_bytes": {"planned": round(planned.peak), "run": record.peak_bytes,
                       "run_of_planned": round(record.peak_bytes / planned.peak, 4)},
        "faults": [str(fault)[:200] for fault in faults(record, planned)][:5],
    }  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", type=int, help="So many devices only.")
@click.option("--way", "ways", multiple=True, help="These ways only; free: as the planner chooses.")
@click.option("--tokens", "lengths", type=int, multiple=True, help="These lengths only, without a search.")
@click.option("--offload", type=click.Choice(OFFLOADS), help="What may wait in the memory of the host.")
@click.option("--mode", default="fast", show_default=True, help="How long to search.")
@click.option("--layers", type=int, help="A model of fewer layers, to try the benchmark.")
@click.option("--run", "runs", is_flag=True, help="Run the longest plan on fake CUDA tensors.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where the rows are written.")
def main(
    only: int | None,
    ways: tuple[str, ...],
    lengths: tuple[int, ...],
    offload: str | None,
    mode: str,
    layers: int | None,
    runs: bool,
    output: Path | None,
) -> None:
    """Search the longest sequences and say what they cost."""
    console = Console(stderr=True, width=200)
    for cluster, first in CLUSTERS.items():
        for way in WAYS:
            asked = Asked(cluster=cluster, way=way, offload=offload, mode=mode, layers=layers)
            if asked.devices == 1 and (way is not None or not offload):
                continue
            if (only and only != asked.devices) or (ways and (way or "free") not in ways):
                continue
            tried = []
            for row in (_row(asked, tokens) for tokens in lengths) if lengths else longest(asked, first):
                tried.append(row)
                console.print(json.dumps(row), markup=False)
                keep(output, [row])
            best = _longest_of(tried)
            if best is not None and runs:
                best["on_fake_cuda"] = on_fake_cuda(asked, best["tokens"])
                console.print(json.dumps(best["on_fake_cuda"]), markup=False)
                keep(output, [best])


def keep(output: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows in place of those of the same cluster, way and length, and mark the longest that fits of each way."""
    if output is None:
        return
    kept = json.loads(output.read_text()) if output.exists() else {}
    joined = {_question(row): row for row in (*kept.get("rows", ()), *rows)}
    ways: dict[Any, list[dict[str, Any]]] = {}
    for key in sorted(joined, key=_order):
        ways.setdefault(key[:2], []).append(dict(joined[key]))
    for tried in ways.values():
        best = _longest_of(tried)
        for row in tried:
            row["longest"] = row is best
    note = {"note": kept["note"]} if "note" in kept else {}
    command = shlex.join(["python", "-m", "benchmarks.long_contexts", *sys.argv[1:]])
    write_results(output, {**note, "rows": [row for tried in ways.values() for row in tried], "command": command})


def _question(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["cluster"], row["way"], row["tokens"]


def _order(key: tuple[str, str, int]) -> tuple[int, int, int]:
    cluster, way, tokens = key
    return list(CLUSTERS).index(cluster), WAYS.index(None if way == "free" else way), tokens


def _longest_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return max((row for row in rows if "error" not in row), key=lambda row: row["tokens"], default=None)


if __name__ == "__main__":
    main()
