"""Jobs that test the pool itself."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.captured_once import capture_once, captures_of, compile_once, prepared_by
from tests.distributed.models import NormalisedModel

BATCH = {"x": torch.zeros(6, 8), "y": torch.zeros(6, 4)}


def sum_of_ranks() -> float:
    """Sum of all ranks by one all-reduce."""
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return float(value)


def sleep_on_last_rank() -> None:
    """The last rank never answers."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(600)


def fail() -> None:
    """Raise with a known text."""
    raise ValueError("planted")


def captured(**_: Any) -> bool:
    """Capture a model for all ranks."""
    return capture_once("of a pool", NormalisedModel(), BATCH)


@prepared_by(captured)
def compiled(dims: dict[str, int]) -> tuple[int, int, int]:
    """(process, hash of a text, programs that this worker had to capture itself for a plan)."""
    model = NormalisedModel()
    before = captures_of("of a pool", model).made
    compile_once("of a pool", model, BATCH, dims=dims, mode="fast")
    return os.getpid(), hash("a text"), captures_of("of a pool", model).made - before


def exit_on(rank: int) -> None:
    """One rank ends."""
    if dist.get_rank() == rank:
        os._exit(1)


def not_prepared(name: str) -> bool:
    """Raise."""
    raise KeyError(f"no case {name!r}")


@prepared_by(not_prepared)
def unprepared(name: str) -> None:
    """Never runs."""
