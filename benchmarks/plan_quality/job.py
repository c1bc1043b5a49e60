"""What every rank does for a setting: build all runs, then train them in turn, step by step.

    python -m benchmarks.plan_quality.job SETTING FOLDER STEPS AGAIN       reads FOLDER/runs.json, FOLDER/*.plan

Runs are interleaved, so that whatever disturbs the machine disturbs all of them. The first step of a run is its
warm-up. After STEPS timed steps of each (fewer of the slow ones, see `wants_more`), the three fastest and our choice
run AGAIN steps more. Rank 0 writes FOLDER/results.json, and FOLDER/NAME.jsonl, the `autopar.StepLog` of each of our
plans.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.parallel_plan import Plan
from autopar.runtime.communicator import waited_seconds
from benchmarks.netlab.counters import read_counters
from benchmarks.plan_quality.baselines import BASELINES
from benchmarks.plan_quality.baselines.trained import Trained, sgd, trained
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.plans import CHOSEN, FORCED
from benchmarks.plan_quality.rows import CLASSIC
from benchmarks.plan_quality.settings import SETTINGS, SMALL, Setting
from benchmarks.storages import StorageTracker

RUNS, RESULTS = "runs.json", "results.json"
WARM_UP_STEPS = 1
FASTEST = 3
SLOW = 3.0
"""A run that takes so many times the fastest one's step will not win."""
SLOW_RUN_SECONDS = 10.0
"""A slow run has timed steps until they took so long together, and one in any case."""
COMPARED = {run for runs in CLASSIC.values() for run in runs} | {f"{FORCED}{kind}" for kind in CLASSIC}
"""Runs that others are held against, however slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What trains. log: of our plans."""

    trained: Trained
    log: autopar.StepLog | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mine:
    """A step as this rank saw it. waited_seconds: for collectives of our runtime; loss: None where it sees none."""

    seconds: float
    cpu_seconds: float
    waited_seconds: float
    loss: float | None


def main(name: str, folder: Path, steps: int, again: int) -> None:
    """All runs of a setting on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    began = time.perf_counter()
    with contextlib.ExitStack() as logs:
        runs, rows, errors = build_all({**SETTINGS, **SMALL}[name], folder, logs)
        built = time.perf_counter()
        gc.freeze()  # what was built stays; looking through it would be counted as somebody's step
        for done in range(steps):
            for run in [run for run in runs if wants_more(run, rows, done)]:
                rows[run].append(measured_step(runs[run]))
        best = fastest(rows)
        for _ in range(again):
            for run in best:
                rows[run].append(measured_step(runs[run]))
    trained_at = time.perf_counter()
    peaks = {run: peak_bytes(one) for run, one in runs.items() if run.startswith(CHOSEN)}
    elapsed = {"building": built - began, "training": trained_at - built, "memory": time.perf_counter() - trained_at}
    if dist.get_rank() == 0:
        found = {"rows": rows, "errors": errors, "peak_bytes": peaks, "elapsed": elapsed}
        (folder / RESULTS).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def build_all(
    setting: Setting, folder: Path, logs: contextlib.ExitStack
) -> tuple[dict[str, Run], dict[str, list[dict[str, Any]]], dict[str, str]]:
    """What can be built and has made a first step, that step, and why the rest cannot."""
    runs: dict[str, Run] = {}
    rows: dict[str, list[dict[str, Any]]] = {}
    errors: dict[str, str] = {}
    names = json.loads((folder / RUNS).read_text())
    captured = Captured(setting) if set(names) - set(BASELINES) else None
    for name in names:
        began, before = time.perf_counter(), _payload()
        try:
            run = build(name, setting, captured, folder, logs)
            mine = timed_step(run)  # what cannot run fails here, and not between the others
            error = None
        except (RuntimeError, ValueError, NotImplementedError, AssertionError) as reason:
            error = f"{type(reason).__name__}: {reason}"
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, error)
        if any(said):
            errors[name] = next(text for text in said if text)
        else:
            runs[name], rows[name] = run, [together(mine, before, _payload())]
        if dist.get_rank() == 0:
            print(f"  built {name} in {time.perf_counter() - began:.1f} s {errors.get(name, '')}", flush=True)
    return runs, rows, errors


def build(name: str, setting: Setting, captured: Captured | None, folder: Path, logs: contextlib.ExitStack) -> Run:
    """A run by its name: a baseline, else ours by its plan's file."""
    if name in BASELINES:
        model, inputs = setting.model_and_inputs()
        return Run(trained=BASELINES[name].build(model, inputs, dist.get_world_size()))
    assert captured is not None
    plan = Plan.load(folder / f"{name}.plan")
    module = captured.module(plan)
    log = logs.enter_context(autopar.StepLog(folder / f"{name}.jsonl", plan))
    return Run(trained=trained(module, captured.inputs, sgd(module.parameters())), log=log)


def timed_step(run: Run) -> Mine:
    """One step of this rank."""
    begin, cpu, waited = time.perf_counter(), time.process_time(), waited_seconds()
    with contextlib.nullcontext() if run.log is None else run.log.step():
        loss = run.trained.step()
    return Mine(
        seconds=time.perf_counter() - begin,
        cpu_seconds=time.process_time() - cpu,
        waited_seconds=waited_seconds() - waited,
        loss=None if loss is None else float(loss),
    )


def measured_step(run: Run) -> dict[str, Any]:
    """One step; all ranks begin together."""
    dist.barrier()
    before = _payload()
    dist.barrier()
    mine = timed_step(run)
    dist.barrier()
    return together(mine, before, _payload())


def together(mine: Mine, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A step of all ranks. seconds: of the slowest; the others by rank; sent_bytes: [from][to] between nodes."""
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {
        "seconds": max(each.seconds for each in found),
        "cpu_seconds": [each.cpu_seconds for each in found],
        "waited_seconds": [each.waited_seconds for each in found],
        "loss": statistics.fmean(each.loss for each in found if each.loss is not None),
        "sent_bytes": [[b - a for a, b in zip(x, y, strict=True)] for x, y in zip(before, after, strict=True)],
    }


def wants_more(run: str, rows: Mapping[str, Sequence[Mapping[str, Any]]], done: int) -> bool:
    """Whether a run takes part in the round behind `done` timed ones; alike on all ranks, since the numbers are.

    The first is everybody's. Then what takes `SLOW` times the fastest step stops, at once or, where others are held
    against it, once its steps took `SLOW_RUN_SECONDS`.
    """
    if done < 1:
        return True
    if len(rows[run]) < WARM_UP_STEPS + done:
        return False
    medians = median_seconds(rows)
    if medians[run] <= SLOW * min(medians.values()):
        return True
    return run in COMPARED and sum(step["seconds"] for step in rows[run][WARM_UP_STEPS:]) < SLOW_RUN_SECONDS


def median_seconds(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Of the timed steps of every run."""
    return {name: statistics.median(row["seconds"] for row in each[WARM_UP_STEPS:]) for name, each in rows.items()}


def fastest(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The three fastest, and our choice; alike on all ranks, since the numbers are."""
    medians = median_seconds(rows)
    best = sorted(medians, key=lambda name: medians[name])[:FASTEST]
    return best if CHOSEN in best or CHOSEN not in medians else [*best, CHOSEN]


def peak_bytes(run: Run) -> float:
    """The largest peak of any rank in one more step: parameters and whatever lives with them."""
    with StorageTracker(run.trained.tensors()) as tracker:
        run.trained.step()
    peak = torch.tensor(float(tracker.peak_bytes), dtype=torch.float64)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak)


def _payload() -> list[list[int]]:
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    payload: list[list[int]] = read_counters(Path(os.environ["AUTOPAR_NETLAB_COUNTERS"]), nodes).payload.tolist()
    return payload


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
