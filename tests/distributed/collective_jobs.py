"""Jobs: our collectives of CPU tensors beside torch's."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar._compat import resolve_group
from autopar.errors import RankLostError
from autopar.runtime.collectives import communicator as communicators
from autopar.runtime.collectives import host_collectives as ours
from autopar.runtime.collectives.communicator import Communicator
from autopar.runtime.guards import meetings
from autopar.runtime.guards.call_guard import CHECK_CALLS
from autopar.runtime.guards.meetings import meet

c10d = torch.ops._c10d_functional
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "int8": torch.int8}


def _world() -> str:
    return str(dist.group.WORLD.group_name)


def _values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Other integers on every rank, small enough that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def compare(dtype: str, rows: int, width: int, ranks_per_node: int) -> dict[str, bool]:
    """Whether every collective of (ranks * rows, width) gives torch's result; several at a time, awaited backwards."""
    group, ranks = _world(), dist.get_world_size()
    process_group = resolve_group(group)
    communicators._communicators[process_group] = Communicator(process_group, ranks_per_node)
    whole, odd = _values((ranks * rows, width), DTYPES[dtype]), _values((3 * rows + 1, width), DTYPES[dtype])
    me = dist.get_rank()
    sent = [(me + 2 * other) % 3 * rows for other in range(ranks)]
    taken = [(other + 2 * me) % 3 * rows for other in range(ranks)]
    uneven = _values((sum(sent), width), DTYPES[dtype])
    in_place = odd.clone()
    pairs = {
        "reduce_scatter": (
            ours.start_reduce_scatter(whole, "sum", ranks, group, "a"),
            c10d.reduce_scatter_tensor(whole, "sum", ranks, group),
        ),
        "all_gather": (ours.start_all_gather(odd, ranks, group, "b"), c10d.all_gather_into_tensor(odd, ranks, group)),
        "all_reduce": (ours.start_all_reduce(odd, "sum", group, "c"), c10d.all_reduce(odd, "sum", group)),
        "max": (ours.start_all_reduce(odd, "max", group, "c"), c10d.all_reduce(odd, "max", group)),
        "in place": (
            ours.start_all_reduce_in_place(in_place, "sum", group, "d"),
            c10d.all_reduce(odd, "sum", group),
        ),
        "transposed": (
            ours.start_all_reduce(odd.t(), "sum", group, "e"),
            c10d.all_reduce(odd.t().contiguous(), "sum", group),
        ),
        "all_to_all": (
            ours.start_all_to_all(uneven, taken, sent, group, "f"),
            c10d.all_to_all_single(uneven, taken, sent, group),
        ),
    }
    found = {}
    for name, (started, expected) in reversed(pairs.items()):
        result, expected = started.wait(), c10d.wait_tensor(expected)
        found[name] = torch.equal(result, expected) and result.dtype == expected.dtype
    found["in place"] &= torch.equal(in_place, c10d.wait_tensor(c10d.all_reduce(odd, "sum", group)))
    return found


def end_in_a_step(rank: int, check_calls: int) -> None:
    """One rank ends between two collectives of a data-parallel step; the others wait."""
    module, batch = _compiled(check_calls)
    module(**batch).backward()
    if dist.get_rank() == rank:
        module(**batch)  # without its backward
        time.sleep(0.2)
        os._exit(1)
    module(**batch).backward()


def come_late(rank: int, seconds: float) -> str:
    """What a rank says while another does not come to a step; the late one says why its own step fails."""
    _set_timeout(seconds)
    module, batch = _compiled()
    module(**batch).backward()
    if dist.get_rank() == rank:
        time.sleep(3 * seconds)
    begin = time.monotonic()
    try:
        module(**batch).backward()
    except RankLostError as error:
        assert time.monotonic() - begin < 3 * seconds + 5.0
        return str(error)
    return "no error"


def logged_steps(path: str) -> list[str]:
    """The lines of a log of two steps, as rank 0 wrote them."""
    module, batch = _compiled()
    with autopar.StepLog(path, module.plan) as log:
        for _ in range(2):
            with log.step():
                module(**batch).backward()
    dist.barrier()
    with open(path) as file:
        return file.read().splitlines()


def _compiled(check_calls: int = CHECK_CALLS) -> tuple[autopar.ParallelModule, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = LossOf(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)))
    batch = {"x": torch.randn(8, 64)}
    return autopar.compile(model, batch, dims={"dp_shard": dist.get_world_size()}, check_calls=check_calls), batch


class LossOf(nn.Module):
    """Mean square of what a model makes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def _set_timeout(seconds: float) -> None:
    meet((0,), "before the timeout")
    for name in (_world(), meetings._group_name()):
        communicators.communicator_of(name).timeout = timedelta(seconds=seconds)
