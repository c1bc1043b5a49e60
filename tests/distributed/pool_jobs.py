"""Jobs that test the pool itself."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


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
