"""Tensor parallelism as DTensor ships it, alone and times data parallelism.

    query, key, value, up, gate    ColwiseParallel        tokens           RowwiseParallel (split vocabulary)
    output, down                   RowwiseParallel        head.output      ColwiseParallel under `loss_parallel`

The table goes by the module's class, as Megatron's does; what is not in it stays replicated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.plan_quality.baselines.data_parallel import shard_layers
from benchmarks.plan_quality.baselines.trained import Trained, device_type, part, sgd
from benchmarks.plan_quality.models import Attention, Chain, Dense, Gated, Gelu, Head, TableFront, TokenFront
from benchmarks.plan_quality.settings import Inputs

AXES = ("dp", "tp")


def tp(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """All ranks split every product; every rank takes the whole batch."""
    mesh = init_device_mesh(device_type(model), (1, ranks), mesh_dim_names=AXES)
    split = split_products(model, mesh["tp"])
    return _trained(model, inputs, split)


def tp_ddp(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """Two ranks split products, and DDP reduces over the pairs."""
    mesh = init_device_mesh(device_type(model), (ranks // 2, 2), mesh_dim_names=AXES)
    split = split_products(model, mesh["tp"])
    module = DistributedDataParallel(model, device_mesh=mesh["dp"])
    return _trained(module, part(inputs, mesh.get_local_rank("dp"), ranks // 2), split)


def tp_fsdp2(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """Two ranks split products, and FSDP2 shards over the pairs."""
    mesh = init_device_mesh(device_type(model), (ranks // 2, 2), mesh_dim_names=AXES)
    split = split_products(model, mesh["tp"])
    shard_layers(model, mesh["dp"], reshard=True)
    return _trained(model, part(inputs, mesh.get_local_rank("dp"), ranks // 2), split)


def no_styles(model: nn.Module) -> str | None:
    """Why torch's styles cannot split this model; None where they can."""
    if isinstance(model, Chain):
        return None
    return f"torch's parallel styles split Linear and Embedding; {type(model).__name__} is made of convolutions"


def split_products(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Apply the table; returns whether the logits stay split over the classes."""
    styles = dict(_styles(model, mesh.size()))
    parallelize_module(model, mesh, styles)
    return "head.output" in styles


def _styles(model: nn.Module, ranks: int) -> Iterator[tuple[str, ParallelStyle]]:
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            yield from ((f"{name}.{child}", ColwiseParallel()) for child in ("query", "key", "value"))
            yield f"{name}.output", RowwiseParallel()
        elif isinstance(module, Gelu | Gated | Dense):
            yield from ((f"{name}.{child}", ColwiseParallel()) for child in ("gate", "up") if hasattr(module, child))
            yield f"{name}.down", RowwiseParallel()
        elif isinstance(module, TokenFront):
            yield f"{name}.tokens", RowwiseParallel(input_layouts=Replicate())
        elif isinstance(module, TableFront):
            yield from (
                (f"{name}.tables.{table}", RowwiseParallel(input_layouts=Replicate()))
                for table in range(len(module.tables))
            )
        elif isinstance(module, Head) and module.output.out_features % ranks == 0:
            yield f"{name}.output", ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)


def _trained(module: nn.Module, inputs: Inputs, split_logits: bool) -> Trained:
    optimizer = sgd(module.parameters())

    def step() -> torch.Tensor:
        with loss_parallel() if split_logits else contextlib.nullcontext():
            loss = module(**inputs)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()

    return Trained(step=step)
