"""What every rank does for one row: compile, train a few steps, look at the clock and at the storages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import autopar
from autopar.plans.parallel_plan import Plan
from benchmarks.steps.models import small_model
from benchmarks.storages import StorageTracker

WARM_UP_STEPS = 2


def run(name: str, dims: Mapping[str, int] | None, steps: int) -> dict[str, Any]:
    """Medians over `steps` of the slowest rank's seconds (whole step, and its parts), and the largest peak in bytes."""
    model, inputs = small_model(name)
    module = autopar.compile(model, inputs, optimizer=torch.optim.AdamW, dims=dims, mode="fast")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    for _ in range(WARM_UP_STEPS):
        _step(module, optimizer, inputs)
    timed = [_step(module, optimizer, inputs) for _ in range(steps)]
    peak = _peak_bytes(module, optimizer, inputs)
    plan = module.plan
    assert isinstance(plan, Plan)
    return {
        **_slowest({part: statistics.median(step[part] for step in timed) for part in timed[0]}),
        **_slowest({"peak_bytes": float(peak)}),
        "predicted_seconds": plan.predicted.step_seconds,
        "predicted_peak_bytes": float(plan.predicted.peak_bytes),
        "mesh": msgspec.to_builtins(plan.mesh),
        "profile": plan.profile,
    }


def plain(name: str, steps: int) -> dict[str, float]:
    """The unmodified model on one process: the same numbers without a prediction."""
    model, inputs = small_model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(WARM_UP_STEPS):
        _step(model, optimizer, inputs)
    timed = [_step(model, optimizer, inputs) for _ in range(steps)]
    return {part: statistics.median(step[part] for step in timed) for part in timed[0]}


def _step(module: Any, optimizer: torch.optim.Optimizer, inputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """One training step; all ranks begin together."""
    if dist.get_world_size() > 1:
        dist.barrier()
    begin = time.perf_counter()
    result = module(**inputs)
    loss = result if isinstance(result, torch.Tensor) else result.loss
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    end = time.perf_counter()
    return {
        "forward_seconds": forward - begin,
        "backward_seconds": backward - forward,
        "optimizer_seconds": end - backward,
        "step_seconds": end - begin,
    }


def _peak_bytes(module: Any, optimizer: torch.optim.Optimizer, inputs: Mapping[str, torch.Tensor]) -> int:
    """Peak of one step, with parameters, optimizer state and the batch."""
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    with StorageTracker([*module.parameters(), *module.buffers(), *states]) as tracker:
        _step(module, optimizer, inputs)
    peak: int = tracker.peak_bytes
    return peak


def _slowest(values: Mapping[str, float]) -> dict[str, float]:
    """The largest value of any rank."""
    numbers = torch.tensor(list(values.values()), dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return dict(zip(values, numbers.tolist(), strict=True))
