"""What every rank does for a setting: build all runs, then train them in turn, step by step.

    python -m benchmarks.plan_quality.job SETTING FOLDER STEPS AGAIN       reads FOLDER/runs.json, FOLDER/*.plan

Runs are interleaved, so that whatever disturbs the machine disturbs all of them. After STEPS timed steps of each, the
three fastest and our choice run AGAIN steps more. Rank 0 writes FOLDER/results.json.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from benchmarks.netlab.counters import read_counters
from benchmarks.plan_quality.baselines import BASELINES
from benchmarks.plan_quality.baselines.trained import Trained, sgd, trained
from benchmarks.plan_quality.plans import CHOSEN
from benchmarks.plan_quality.settings import SETTINGS, SMALL, Setting
from benchmarks.storages import StorageTracker

RUNS, RESULTS = "runs.json", "results.json"
WARM_UP_STEPS = 1
FASTEST = 3


def main(name: str, folder: Path, steps: int, again: int) -> None:
    """All runs of a setting on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs, errors = build_all({**SETTINGS, **SMALL}[name], folder)
    gc.freeze()  # what was built stays; looking through it would be counted as somebody's step
    rows: dict[str, list[dict[str, Any]]] = {run: [] for run in runs}
    for _ in range(WARM_UP_STEPS + steps):
        take_turns(runs, runs, rows)
    best = fastest(rows)
    for _ in range(again):
        take_turns(best, runs, rows)
    peaks = {run: peak_bytes(one) for run, one in runs.items() if run.startswith(CHOSEN)}
    if dist.get_rank() == 0:
        (folder / RESULTS).write_text(json.dumps({"rows": rows, "errors": errors, "peak_bytes": peaks}))
    dist.barrier()
    dist.destroy_process_group()


def build_all(setting: Setting, folder: Path) -> tuple[dict[str, Trained], dict[str, str]]:
    """What can be built and has made a first step, and why the rest cannot."""
    runs, errors = {}, {}
    for name in json.loads((folder / RUNS).read_text()):
        began = time.perf_counter()
        try:
            runs[name] = build(name, setting, folder)
            runs[name].step()  # what cannot run fails here, and not between the others
            error = None
        except (RuntimeError, ValueError, NotImplementedError, AssertionError) as reason:
            error = f"{type(reason).__name__}: {reason}"
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, error)
        if any(said):
            runs.pop(name, None)
            errors[name] = next(text for text in said if text)
        if dist.get_rank() == 0:
            print(f"  built {name} in {time.perf_counter() - began:.1f} s {errors.get(name, '')}", flush=True)
    return runs, errors


def build(name: str, setting: Setting, folder: Path) -> Trained:
    """A run by its name: ours by its plan's file, else a baseline."""
    model, inputs = setting.model_and_inputs()
    if name in BASELINES:
        return BASELINES[name].build(model, inputs, dist.get_world_size())
    module = autopar.compile(model, inputs, optimizer=torch.optim.SGD, plan=folder / f"{name}.plan")
    return trained(module, inputs, sgd(module.parameters()))


def take_turns(
    names: Sequence[str] | Mapping[str, Any], runs: Mapping[str, Trained], rows: Mapping[str, list[Any]]
) -> None:
    """One step of each."""
    for name in names:
        rows[name].append(measured_step(runs[name]))


def measured_step(run: Trained) -> dict[str, Any]:
    """One step; all ranks begin together. seconds: of the slowest rank; sent_bytes: [from][to] between nodes."""
    dist.barrier()
    before = _payload()
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    loss = run.step()
    mine = time.perf_counter() - begin, time.process_time() - cpu, None if loss is None else float(loss)
    dist.barrier()
    after = _payload()
    found: list[tuple[float, float, float | None]] = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    sent = [[b - a for a, b in zip(x, y, strict=True)] for x, y in zip(before, after, strict=True)]
    return {
        "seconds": max(seconds for seconds, _, _ in found),
        "cpu_seconds": [cpu for _, cpu, _ in found],
        "loss": statistics.fmean(value for _, _, value in found if value is not None),
        "sent_bytes": sent,
    }


def fastest(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The three fastest, and our choice; alike on all ranks, since the numbers are."""
    medians = {name: statistics.median(row["seconds"] for row in each[WARM_UP_STEPS:]) for name, each in rows.items()}
    best = sorted(medians, key=lambda name: medians[name])[:FASTEST]
    return best if CHOSEN in best or CHOSEN not in medians else [*best, CHOSEN]


def peak_bytes(run: Trained) -> float:
    """The largest peak of any rank in one more step: parameters and whatever lives with them."""
    with StorageTracker(run.tensors()) as tracker:
        run.step()
    peak = torch.tensor(float(tracker.peak_bytes), dtype=torch.float64)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak)


def _payload() -> list[list[int]]:
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    payload: list[list[int]] = read_counters(Path(os.environ["AUTOPAR_NETLAB_COUNTERS"]), nodes).payload.tolist()
    return payload


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
