"""A job of the workers: one step of a compiled model under torch.profiler."""

from __future__ import annotations

import torch
import torch.distributed as dist

import autopar
from autopar.capture.models import load_model


def profiled_step(model: str, batch: int, seq: int, plan: str, folder: str) -> str:
    """Train two steps under a plan file, the second one profiled; returns the file of this rank's trace."""
    module, inputs = load_model(model, batch, seq)
    torch.manual_seed(0)
    given = {name: torch.randint(0, 96, tuple(value.shape)) for name, value in dict(inputs).items()}
    compiled = autopar.compile(module, given, plan=plan)
    path = f"{folder}/rank{dist.get_rank()}.json"
    with torch.profiler.profile(
        profile_memory=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
        on_trace_ready=lambda finished: finished.export_chrome_trace(path),
    ) as profiler:
        for _ in range(2):
            compiled(**given).loss.backward()
            profiler.step()
    return path
