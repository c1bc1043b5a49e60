"""What a run costs to move and to keep: state between plans in memory, and checkpoints beside the training.

    python -m benchmarks.survival [pairs] [peak] [stall] [--json] [--result RESULT.json]

pairs: a small OLMoE with gradients and states of AdamW, by `autopar.reshard` between every two of fourteen plans of one
to eight ranks, on eight gloo processes: values that are not those of the other plan, bit by bit; bytes that all ranks
hand to the transport over the least that there can be, counted apart by masks of elements.
peak: a Llama of fp32 from ZeRO-3 to tensor parallelism and back by `ParallelModule.replan`: peak of resident memory
above what was held before, beside the bound; bytes counted and predicted.
stall: seconds for which training stands still for a checkpoint, by `autopar.save` and by `autopar.Checkpointer`, in
turns, and those until it is on the disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture import Captures
from autopar.hardware.cluster import Cluster
from autopar.layouts.index_blocks import Block, block_of
from autopar.passes.lowering.chain import step_to_run
from autopar.planner.batch.micro_batch_program import planned_parts
from autopar.plans.parallel_plan import Plan
from autopar.questions import CapturedModel, capture_model
from autopar.request import Request
from autopar.runtime.checkpoints import resharded
from autopar.runtime.parameters import local_block, to_torch
from autopar.runtime.weights.moved_state import StateMover
from benchmarks.models import olmoe
from benchmarks.results import commit, document, write_results
from benchmarks.weights import llama, measured
from benchmarks.workers import Pool

WORLD = 8
PLANS: dict[str, tuple[int, dict[str, int], bool]] = {
    "one process": (1, {"dp_replicate": 1}, True),
    "DDP 2": (2, {"dp_replicate": 2}, True),
    "ZeRO-3 3": (3, {"dp_shard": 3}, True),
    "ZeRO-3 8": (8, {"dp_shard": 8}, True),
    "HSDP 6": (6, {"dp_replicate": 2, "dp_shard": 3}, True),
    "TP 2": (2, {"tp": 2}, True),
    "TP 4": (4, {"tp": 4}, True),
    "CP 3": (3, {"cp": 3}, True),
    "EP 4": (4, {"ep": 4}, True),
    "EP x ZeRO 6": (6, {"dp_shard": 2, "ep": 3}, True),
    "ZeRO x TP 8": (8, {"dp_shard": 4, "tp": 2}, True),
    "PP 2": (2, {"pp": 2}, True),
    "PP x TP 6": (6, {"pp": 3, "tp": 2}, True),
    "forward, TP 2": (2, {"tp": 2}, False),
}
"""Name -> ranks, axes, and whether it trains."""
VALUES = ("", "gradient.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
"""What lies as a parameter does."""
Place = tuple[int, bytes, dict[str, tuple[int, ...]]]
"""A plan's ranks and its file, and by parameter the rank groups that hold it."""


def _model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = olmoe(layers=3, width=48, hidden=96, heads=12, experts=24, chosen=2, vocabulary=480)
    tokens = torch.randint(0, 480, (24, 24))
    return model, {"input_ids": tokens, "labels": tokens}


@cache
def _shapes() -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in _model()[0].named_parameters()}


@cache
def _captured(trains: bool) -> CapturedModel:
    model, inputs = _model()
    return capture_model(
        model.train(trains), (), inputs, Request(cluster=Cluster.parse("1 cpu")), Captures(), training=trains
    )


def _planned(ranks: int, dims: dict[str, int], trains: bool) -> Place:
    model, inputs = _model()
    plan = autopar.plan(
        model.train(trains), inputs, cluster=f"{ranks} cpu", dims=dims, mode="fast", optimizer=torch.optim.AdamW
    )
    return ranks, plan.to_json(), _holders(plan, trains)


def _holders(plan: Plan, trains: bool) -> dict[str, tuple[int, ...]]:
    """Parameter -> the rank groups that hold it: what its stages read; all, where none does."""
    everywhere = tuple(range(len(plan.rank_groups)))
    if not plan.in_stages:
        return dict.fromkeys(_shapes(), everywhere)
    captured = _captured(trains)
    lowered = step_to_run(planned_parts(captured.program, plan.micro_batches, captured), plan, 0)
    on = {
        name: tuple(sorted({group for stage in stages for group in lowered.schedule.holders[stage]}))
        for name, stages in lowered.cut.holders.items()
    }
    return {name: on.get(name) or everywhere for name in _shapes()}


def _block(place: Place, name: str, shape: tuple[int, ...], rank: int) -> Block | None:
    """What a rank holds of a parameter."""
    ranks, content, holders = place
    plan = _plan(content)
    if rank >= ranks or plan.group_of(rank) not in holders[name]:
        return None
    own = plan.on_group(plan.group_of(rank))
    stored = own.parameters[name].stored if name in own.parameters else None
    first = plan.rank_groups[plan.group_of(rank)].first_rank
    return block_of(shape, stored or (autopar.Replicate(),) * len(own.mesh.shape), own.mesh, rank - first)


@cache
def _plan(content: bytes) -> Plan:
    return Plan.from_json(content)


def least_bytes(before: Place, after: Place) -> int:
    """By masks of the elements of every parameter: those that a rank is to hold and does not, once."""
    missing = 0
    for name, shape in _shapes().items():
        for rank in range(WORLD):
            had, gets = (_mask(_block(place, name, shape, rank), shape) for place in (before, after))
            missing += int((gets & ~had).sum())
    return missing * 4 * len(VALUES)


def _mask(block: Block | None, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    mask = np.zeros(shape, dtype=bool)
    if block is not None:
        indices = [[i for start, length in runs for i in range(start, start + length)] for runs in block]
        mask[np.ix_(*indices)] = True
    return mask


# jobs


@cache
def _whole(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, key))))


def _held(place: Place) -> dict[str, torch.Tensor]:
    """The state of this rank under a plan."""
    rank, state = dist.get_rank(), {}
    for name, shape in _shapes().items():
        if _block(place, name, shape, rank) is not None:
            for prefix in VALUES:
                state[prefix + name] = _dtensor(place, name, _whole(prefix + name, shape))
    return state


def _dtensor(place: Place, name: str, whole: torch.Tensor) -> torch.Tensor:
    plan = _plan(place[1])
    group = plan.group_of(dist.get_rank())
    own, first = plan.on_group(group), plan.rank_groups[group].first_rank
    stored = own.parameters[name].stored if name in own.parameters else (autopar.Replicate(),) * len(own.mesh.shape)
    ranks = torch.arange(first, first + own.mesh.size).reshape(own.mesh.shape)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=own.mesh.axis_names, _init_backend=False)
    block = local_block(whole, stored, own.mesh, dist.get_rank() - first).clone()
    return DTensor.from_local(
        block, mesh, to_torch(stored, own.mesh), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def move_all(places: dict[str, Place]) -> dict[str, dict[str, Any]]:
    """Job of a rank: every pair; wrong values, bytes that it sent, seconds."""
    found: dict[str, dict[str, Any]] = {}
    sent: list[int] = []
    module: Any = resharded
    as_it_is = module.move_blocks

    def counted(*arguments: Any) -> int:
        sent.append(as_it_is(*arguments))
        return sent[-1]

    module.move_blocks = counted
    states = {name: _held(place) if dist.get_rank() < place[0] else {} for name, place in places.items()}
    for before, after in itertools.product(places, places):
        plan = _plan(places[after][1])
        takes = list(states[after]) if plan.in_stages else None
        dist.barrier()
        began = time.perf_counter()
        blocks = autopar.reshard(states[before], _plan(places[before][1]), plan, takes=takes)
        seconds = time.perf_counter() - began
        wanted = {name: value.to_local() for name, value in states[after].items()}  # type: ignore[attr-defined]
        wrong = [name for name in wanted.keys() | blocks.keys() if not _equal(wanted.get(name), blocks.get(name))]
        found[f"{before} -> {after}"] = {"wrong": wrong, "sent": sent.pop(), "seconds": seconds}
    return found


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def there_and_back(layers: int) -> list[dict[str, Any]]:
    """Job of a rank: ZeRO-3 to tensor parallelism and back."""
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    other = autopar.compile(llama(layers).float(), inputs, dims={"tp": dist.get_world_size()}, mode="fast").plan
    module = autopar.compile(llama(layers).float(), inputs, dims={"dp_shard": dist.get_world_size()}, mode="fast")
    optimizer = torch.optim.AdamW(module.parameters())
    module(**inputs)[0].backward()
    optimizer.step()
    rows = []
    for plan in (other, module.plan):
        row: dict[str, Any] = {}
        began = time.perf_counter()
        with mock.patch.object(StateMover, "move", _watched_method(StateMover.move, row)):
            moved = module.replan(plan, optimizer)
        rows.append({"with_capture_seconds": time.perf_counter() - began, **row, **asdict(moved)})
    return rows


def _watched_method(move: Callable[..., Any], row: dict[str, Any]) -> Callable[..., Any]:
    """The move alone, without the capture of the graph before it."""

    def watched(mover: StateMover, *arguments: Any) -> Any:
        dist.barrier()
        with measured(row, "move"):
            return move(mover, *arguments)

    return watched


def saved_beside(folder: str, layers: int, times: int) -> dict[str, Any]:
    """Job of a rank: checkpoints in turns by `save` and by a checkpointer."""
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    module = autopar.compile(llama(layers).float(), inputs, dims={"dp_shard": dist.get_world_size()}, mode="fast")
    optimizer = torch.optim.AdamW(module.parameters())
    found: dict[str, Any] = {"save": [], "stall": [], "written": [], "step": []}
    with autopar.Checkpointer(f"{folder}/beside", module, optimizer, every=1, keep=1) as saver:
        for turn in range(times + 1):
            began = time.perf_counter()
            module(**inputs)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            found["step"].append(time.perf_counter() - began)
            dist.barrier()
            began = time.perf_counter()
            autopar.save(f"{folder}/save", module, optimizer)
            found["save"].append(time.perf_counter() - began)
            dist.barrier()
            began = time.perf_counter()
            assert saver.step()
            found["stall"].append(time.perf_counter() - began)
            saver.wait()
            found["written"].append(time.perf_counter() - began)
            if turn == 0:  # the writer starts, and the memory of the copy is made
                found["first"] = {name: values.pop() for name, values in found.items() if isinstance(values, list)}
    found["bytes"] = sum(file.stat().st_size for file in Path(folder, "save").rglob("*.distcp"))
    return found


# rows


def pairs() -> list[dict[str, Any]]:
    """One row for every two plans."""
    places = {name: _planned(*asked) for name, asked in PLANS.items()}
    pool = Pool(WORLD)
    try:
        ranks = pool.run("benchmarks.survival:move_all", world_size=WORLD, timeout=900.0, places=places)
    finally:
        pool.close()
    rows = []
    for before, after in itertools.product(places, places):
        each = [rank[f"{before} -> {after}"] for rank in ranks]
        sent, least = sum(rank["sent"] for rank in each), least_bytes(places[before], places[after])
        rows.append(
            {
                "before": before,
                "after": after,
                "wrong_values": sum(len(rank["wrong"]) for rank in each),
                "sent_bytes": sent,
                "least_bytes": least,
                "over_least": sent / least if least else float(sent > 0) + 1.0,
                "most_by_a_rank": max(rank["sent"] for rank in each),
                "seconds": max(rank["seconds"] for rank in each),
            }
        )
    return rows


def peak() -> list[dict[str, Any]]:
    """One row for every rank and way. Buffers are maps of their own, which go back to the system when they are freed:
    resident memory is what is held then; a process of autopar keeps freed memory else."""
    with mock.patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}):
        ranks = _pooled("there_and_back", layers=2)
    return [{"rank": rank, "way": way, **row} for rank, rows in enumerate(ranks)
            for way, row in zip(("ZeRO-3 4 -> TP 4", "TP 4 -> ZeRO-3 4"), rows, strict=True)]  # fmt: skip


def stall() -> list[dict[str, Any]]:
    """One row for every rank."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = _pooled("saved_beside", folder=folder, layers=2, times=5)
    return [{"rank": rank, **row} for rank, row in enumerate(ranks)]


def _pooled(job: str, **arguments: Any) -> list[Any]:
    pool = Pool(4)
    try:
        return pool.run(f"benchmarks.survival:{job}", world_size=4, timeout=600.0, **arguments)
    finally:
        pool.close()


PARTS = {"pairs": pairs, "peak": peak, "stall": stall}


def _told(content: Mapping[str, Any]) -> str:
    lines = []
    if rows := content.get("pairs"):
        worst = max(rows, key=lambda row: row["over_least"])
        lines.append(
            f"{len(rows)} pairs of {len(PLANS)} plans: {sum(row['wrong_values'] for row in rows)} wrong values, "
            f"at most {worst['over_least']:.3f} of the least bytes"
        )
    for row in content.get("peak", ()):
        lines.append(
            f"{row['way']}, rank {row['rank']}: sent {row['sent_bytes'] / 1e6:.1f} MB (predicted "
            f"{row['predicted_bytes'] / 1e6:.1f}), peak {row['move_peak_bytes'] / 1e6:.1f} MB, bound "
            f"{row['peak_bytes'] / 1e6:.1f} MB, {row['seconds']:.2f} s (predicted {row['predicted_seconds']:.2f})"
        )
    for row in content.get("stall", ()):
        save, stalled, written = (float(np.median(row[name])) for name in ("save", "stall", "written"))
        lines.append(
            f"rank {row['rank']}: {row['bytes'] / 1e6:.0f} MB, save {save:.2f} s, stall {stalled:.2f} s, written after "
            f"{written:.2f} s; a step takes {float(np.median(row['step'])):.2f} s"
        )
    return "\n".join(lines)


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="pairs, peak, stall; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--result", type=Path)
    arguments = parser.parse_args()
    content = {name: PARTS[name]() for name in arguments.parts or PARTS}
    told = {"command": ["python", "-m", "benchmarks.survival", *sys.argv[1:]], "commit": commit(), **content}
    print(json.dumps(document(told), indent=1) if arguments.json else _told(content))
    if arguments.result is not None:
        write_results(arguments.result, told)


if __name__ == "__main__":
    main()
