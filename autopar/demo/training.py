"""Second half of the demo: train a byte-level GPT on local processes, beside one plain process.

Both start from the same weights (`WEIGHT_SEED`) and see the same batches (seeded by the step), so their losses may
differ by rounding only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar.api import compile as compile_model
from autopar.demo.gpt import GPT, GPTConfig
from autopar.demo.text import batch_at, library_text
from autopar.plans.parallel_plan import Plan
from autopar.runtime.calibration.measuring_worker import crowd
from autopar.runtime.local_processes import Report, run_processes

SMALL = GPTConfig(vocabulary=256, positions=128, width=256, heads=4, layers=2)
BATCH, STEPS, LEARNING_RATE, WEIGHT_SEED = 16, 40, 1e-3, 0
CROWD_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Loss of every step, the median seconds of a step after the first, and the plan (None: the plain model). crowd:
    seconds that passed per second of CPU time before the first step and behind the last, the larger."""

    losses: tuple[float, ...]
    step_seconds: float
    crowd: float
    plan_json: bytes | None

    @property
    def plan(self) -> Plan | None:
        """The plan under which it trained; None: the plain model."""
        return None if self.plan_json is None else Plan.from_json(self.plan_json)


def train(
    num_processes: int, *, threads: int = 1, planned: bool, steps: int = STEPS, on_step: Callable[[int], None]
) -> Training:
    """Train `SMALL` for `steps` on local processes of `threads` each; `on_step` hears of each finished step."""
    results: list[Training] = run_processes(_train, num_processes, threads, planned, steps, on_report=on_step)
    return results[0]


def _train(report: Report, threads: int, planned: bool, steps: int) -> Training:
    """Body of one process."""
    before = crowd(CROWD_SECONDS)
    torch.set_num_threads(threads)
    torch.manual_seed(WEIGHT_SEED)
    model: torch.nn.Module = GPT(SMALL)
    text = library_text()
    plan = None
    if planned:
        example = batch_at(text, 0, BATCH, SMALL.positions)
        compiled = compile_model(model, example, optimizer=torch.optim.AdamW)
        model, plan = compiled, compiled.plan
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, seconds = [], []
    for step in range(steps):
        started = time.perf_counter()
        loss = model(**batch_at(text, step, BATCH, SMALL.positions))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        report(step + 1)
    torch.set_num_threads(1)
    return Training(
        crowd=max(before, crowd(CROWD_SECONDS)),
        losses=tuple(losses),
        step_seconds=statistics.median(seconds[1:]),
        plan_json=None if plan is None else plan.to_json(),
    )
