"""Pipelines as torch.distributed.pipelining ships them: 1F1B over stages of equally many layers, alone or times
DDP.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.plan_quality.baselines.trained import Trained, part, sgd
from benchmarks.plan_quality.models import Chain, chain_loss
from benchmarks.plan_quality.settings import Inputs

MICRO_BATCHES = 8


def one_f_one_b(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """A stage on every rank."""
    return _pipelined(model, inputs, (1, ranks))


def one_f_one_b_ddp(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """Two stages, each on half of the ranks."""
    return _pipelined(model, inputs, (ranks // 2, 2))


def why_not(model: nn.Module, stages: int) -> str | None:
    """Why this model is no chain of so many stages; None where it is."""
    if not isinstance(model, Chain):
        return f"a stage hands on to the next alone; the skips of {type(model).__name__} reach over stages"
    if len(model.layers) < stages:
        return f"{len(model.layers)} layers are fewer than {stages} stages"
    return None


def stage_of(model: Chain, index: int, count: int) -> nn.Sequential:
    """The index-th of `count` stages: front and head stay with the first and the last layers."""
    size = len(model.layers)
    layers = list(model.layers)[size * index // count : size * (index + 1) // count]
    front = [model.front] if index == 0 else []
    head = [model.head] if index == count - 1 else []
    return nn.Sequential(*front, *layers, *head)


def _pipelined(model: nn.Module, inputs: Inputs, shape: tuple[int, int]) -> Trained:
    assert isinstance(model, Chain)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    copies, stages = shape
    index = mesh.get_local_rank("pp")
    module: nn.Module = stage_of(model, index, stages)
    optimizer = sgd(module.parameters())
    mine = part(inputs, mesh.get_local_rank("dp"), copies)
    count = micro_batches(len(mine["x"]))
    if copies > 1:
        # DDP's rebuilding of buckets asserts one backward between two forwards, which few micro-batches do not keep
        # (torch 2.13, reducer.cpp: "rebuilt parameter indices size"); whoever looks for unused parameters rebuilds none
        few = count <= stages
        module = DistributedDataParallel(module, process_group=mesh.get_group("dp"), find_unused_parameters=few)
    stage = PipelineStage(module, index, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, count, loss_fn=chain_loss)

    def step() -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        x = (mine["x"],) if index == 0 else ()
        target = mine["labels"] if index == stages - 1 else None
        schedule.step(*x, target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return Trained(step=step)


def micro_batches(batch: int) -> int:
    """The most, up to MICRO_BATCHES, that split the batch evenly."""
    return next(count for count in range(min(batch, MICRO_BATCHES), 0, -1) if batch % count == 0)
