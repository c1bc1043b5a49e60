"""Jobs: a rank that stops for good, one that is only slow, one that does something else."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar import api
from autopar.runtime.collectives.host_collectives import Started
from autopar.runtime.consensus import from_first_rank
from autopar.runtime.guards import heartbeat
from tests.distributed.captured_once import capture_once, compile_once, prepared_by

BATCH = {"x": torch.linspace(-1.0, 1.0, 8 * 16).view(8, 16)}


class Squares(nn.Module):
    """Mean square of what a small model makes. forward(x (B, 16)) -> scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def captured(**_: Any) -> bool:
    """Capture the model."""
    return capture_once("squares", Squares(), BATCH)


def _compiled() -> autopar.ParallelModule:
    return compile_once("squares", Squares(), BATCH, dims={"dp_shard": dist.get_world_size()}, mode="fast")


def _stop(rank: int) -> None:
    """Stand still for good, as under a debugger that nobody comes back to."""
    if dist.get_rank() == rank:
        time.sleep(1.0)  # a beat from here
        os.kill(os.getpid(), signal.SIGSTOP)


def _before(patch: pytest.MonkeyPatch, place: Any, name: str, action: Callable[[], None]) -> None:
    real = getattr(place, name)

    def behind(*args: Any, **kwargs: Any) -> Any:
        action()
        return real(*args, **kwargs)

    patch.setattr(place, name, behind)


@prepared_by(captured)
def stopped(where: str, rank: int, limit: float) -> None:
    """One rank stops; the others raise, or wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(heartbeat.VARIABLE, str(limit))
        if where == "planning":
            _before(patch, api, "plan_program", lambda: _stop(rank))
        module = _compiled()
        module(**BATCH).backward()
        if where == "step":
            _before(patch, Started, "wait", lambda: _stop(rank))
            module(**BATCH).backward()
        if where == "save":
            from torch.distributed.checkpoint import state_dict_saver

            _before(patch, state_dict_saver, "save", lambda: _stop(rank))
            autopar.save(from_first_rank(tempfile.mkdtemp), module)
        if where == "own code":
            _stop(rank)
            time.sleep(1000.0)


@prepared_by(captured)
def slow(limit: float) -> float:
    """A plan that takes longer than the limit, while all ranks beat; the loss of a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(heartbeat.VARIABLE, str(limit))
        _before(patch, api, "plan_program", lambda: time.sleep(2 * limit))
        return float(_compiled()(**BATCH))


@prepared_by(captured)
def apart(kind: str, limit: float) -> None:
    """Rank 1 fails in a call, or saves, where the others go backward; it does not end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(heartbeat.VARIABLE, str(limit))
        module = _compiled()
        if dist.get_rank() != 1:
            module(**BATCH).backward()
            return
        if kind == "failed":
            patch.setattr(module, "_results", lambda *_: {}["no such key"])
            with pytest.raises(KeyError):
                module(**BATCH)
            time.sleep(1000.0)
        else:
            module(**BATCH)
            autopar.save(tempfile.mkdtemp(), module)
