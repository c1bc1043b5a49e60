"""What every rank does for a setting: build all runs, then train them in turn, step by step.

    lab.fork(functools.partial(train_all, setting, plans, baselines, captured, folder, 5, 6))

Runs are built, and make the first step of each, which is its warm-up and where its memory is counted, with all of the
machine's cores; from there on a rank has its share. Runs are interleaved, so that whatever disturbs the machine
disturbs all of them. After `steps` timed steps of each (fewer of the slow ones, see `wants_more`, and where all are
slow, see `ROUNDS_SECONDS`), the three fastest and our choice run `again` steps more. Rank 0 writes results.json into
the folder, and NAME.jsonl, the `autopar.StepLog` of each of our plans.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.collectives.communicator import waited_seconds
from benchmarks.netlab.counters import read_counters
from benchmarks.plan_quality.baselines import Baseline
from benchmarks.plan_quality.baselines.trained import Trained, sgd, trained
from benchmarks.plan_quality.captured import Captured
from benchmarks.plan_quality.plans import CHOSEN
from benchmarks.plan_quality.rows import CLASSIC
from benchmarks.plan_quality.settings import Setting
from benchmarks.storages import StorageTracker

RESULTS = "results.json"
WARM_UP_STEPS = 1
FASTEST = 3
SLOW = 2.5
"""A run that takes so many times the fastest one's step will not win."""
SLOW_RUN_SECONDS = 5.0
"""A slow run has timed steps until they took so long together, and one in any case."""
ROUNDS_SECONDS = 90.0
"""Once the timed steps of all runs took so long together, no further round begins, `FEWEST_ROUNDS` in any case."""
FEWEST_ROUNDS = 3
SPARE_MEMORY = 2.0
"""Times the largest peak of our plans: what the allocator has at hand before steps are timed."""
COMPARED = {run for runs in CLASSIC.values() for run in runs}
"""Runs that ours are held against, however slow."""


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


@dataclass(slots=True)
class Built:
    """What trains, by name. rows: its steps, the warm-up first; errors: name -> why it cannot be built;
    peak_bytes: of our plans."""

    runs: dict[str, Run] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    peak_bytes: dict[str, float] = field(default_factory=dict)


def train_all(
    setting: Setting,
    plans: Mapping[str, Plan],
    baselines: Mapping[str, Baseline],
    captured: Captured | None,
    folder: Path,
    steps: int,
    again: int,
    limit_cores: Callable[[], None],
) -> None:
    """All runs of a setting on this rank. limit_cores: gives it its share of a core."""
    dist.init_process_group("gloo")
    began = time.perf_counter()
    with contextlib.ExitStack() as logs:
        built = build_all(setting, plans, baselines, captured, folder, logs)
        touch_memory(built.peak_bytes.values())
        limit_cores()
        gc.freeze()  # what was built stays; looking through it would be counted as somebody's step
        built_at = time.perf_counter()
        for done in range(steps):
            if done >= FEWEST_ROUNDS and timed_seconds(built.rows) > ROUNDS_SECONDS:
                break
            for run in [run for run in built.runs if wants_more(run, built.rows, done)]:
                built.rows[run].append(measured_step(built.runs[run]))
        best = fastest(built.rows)
        for _ in range(again):
            for run in best:
                built.rows[run].append(measured_step(built.runs[run]))
    elapsed = {"building": built_at - began, "training": time.perf_counter() - built_at}
    if dist.get_rank() == 0:
        found = {"rows": built.rows, "errors": built.errors, "peak_bytes": built.peak_bytes, "elapsed": elapsed}
        (folder / RESULTS).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def build_all(
    setting: Setting,
    plans: Mapping[str, Plan],
    baselines: Mapping[str, Baseline],
    captured: Captured | None,
    folder: Path,
    logs: contextlib.ExitStack,
) -> Built:
    """What can be built and has made a first step, that step, and why the rest cannot."""
    built = Built()
    for name in (*plans, *baselines):
        began, before = time.perf_counter(), _payload()
        try:
            run = ours(name, plans[name], captured, folder, logs) if name in plans else theirs(baselines[name], setting)
            mine, peak = counted_step(run)  # what cannot run fails here, and not between the others
            error = None
        except (RuntimeError, ValueError, NotImplementedError, AssertionError) as reason:
            error = f"{type(reason).__name__}: {reason}"
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, error)
        if any(said):
            built.errors[name] = next(text for text in said if text)
        else:
            built.runs[name], built.rows[name] = run, [together(mine, before, _payload())]
            if peak is not None:
                built.peak_bytes[name] = most(peak)
        if dist.get_rank() == 0:
            seconds, step = time.perf_counter() - began, 0.0 if any(said) else mine.seconds
            print(f"  built {name} in {seconds:.1f} s, of which {step:.1f} s are its first step. ", end="")
            print(built.errors.get(name, ""), flush=True)
    return built


def touch_memory(peak_bytes: Iterable[float]) -> None:
    """Have the pages that steps will need, `SPARE_MEMORY` times the largest of these bytes: what was built lies between
    what was freed, so that the first steps of a run with large activations would ask the kernel for new ones, which no
    later step does."""
    torch.empty(int(SPARE_MEMORY * max(peak_bytes, default=0.0)), dtype=torch.uint8).fill_(1)


def theirs(baseline: Baseline, setting: Setting) -> Run:
    """A baseline."""
    model, inputs = setting.model_and_inputs()
    return Run(trained=baseline.build(model, inputs, dist.get_world_size()))


def ours(name: str, plan: Plan, captured: Captured | None, folder: Path, logs: contextlib.ExitStack) -> Run:
    """A plan on our runtime, with its log."""
    assert captured is not None
    module = captured.module(plan)
    log = logs.enter_context(autopar.StepLog(folder / f"{name}.jsonl", plan))
    return Run(trained=trained(module, captured.inputs, sgd(module.parameters())), log=log)


def counted_step(run: Run) -> tuple[Mine, float | None]:
    """A step of this rank and, of our plans, its largest bytes: parameters and whatever lives with them. FSDP2 frees
    storages by resizing them, which the counter does not see."""
    if run.log is None:
        return timed_step(run), None
    with StorageTracker(run.trained.tensors()) as tracker:
        mine = timed_step(run)
    return mine, float(tracker.peak_bytes)


def most(number: float) -> float:
    """The largest of all ranks."""
    found = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


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

    The first is everybody's. Then what takes `SLOW` times the fastest step stops, at once or, where it is a plan of
    ours or one of `COMPARED`, once its steps took `SLOW_RUN_SECONDS`.
    """
    if done < 1:
        return True
    if len(rows[run]) < WARM_UP_STEPS + done:
        return False
    medians = median_seconds(rows)
    if medians[run] <= SLOW * min(medians.values()):
        return True
    is_compared = run in COMPARED or run.startswith(CHOSEN)  # every plan of ours begins so
    return is_compared and sum(step["seconds"] for step in rows[run][WARM_UP_STEPS:]) < SLOW_RUN_SECONDS


def timed_seconds(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> float:
    """Of all runs together; alike on all ranks, since the numbers are."""
    return math.fsum(step["seconds"] for each in rows.values() for step in each[WARM_UP_STEPS:])


def median_seconds(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Of the timed steps of every run."""
    return {name: statistics.median(row["seconds"] for row in each[WARM_UP_STEPS:]) for name, each in rows.items()}


def fastest(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The three fastest, and our choice; alike on all ranks, since the numbers are."""
    medians = median_seconds(rows)
    best = sorted(medians, key=lambda name: medians[name])[:FASTEST]
    return best if CHOSEN in best or CHOSEN not in medians else [*best, CHOSEN]


def _payload() -> list[list[int]]:
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    payload: list[list[int]] = read_counters(Path(os.environ["AUTOPAR_NETLAB_COUNTERS"]), nodes).payload.tolist()
    return payload
