"""Data parallelism as PyTorch ships it: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2 and its hybrid.

Every rank takes its part of the batch. FSDP2 shards layer by layer, as its tutorial does: the layers first, then what
is left with the root.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.plan_quality.baselines.trained import Trained, device_type, my_part, sgd, trained
from benchmarks.plan_quality.models import Chain
from benchmarks.plan_quality.settings import LEARNING_RATE, Inputs
from benchmarks.vision import UNet


def ddp(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """Gradients are reduced in buckets while backward runs."""
    module = DistributedDataParallel(model)
    return trained(module, my_part(inputs), sgd(module.parameters()))


def zero1(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """DDP whose optimizer is shared out; updated parameters are broadcast."""
    module = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=LEARNING_RATE)
    return trained(module, my_part(inputs), optimizer)


def fsdp2(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """Parameters are gathered for forward, and again for backward."""
    return _sharded(model, inputs, init_device_mesh(device_type(model), (ranks,)), reshard=True)


def fsdp2_kept(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """Parameters are gathered once per step."""
    return _sharded(model, inputs, init_device_mesh(device_type(model), (ranks,)), reshard=False)


def hsdp(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """Sharded over the inner two ranks, replicated over the outer half."""
    return _sharded(model, inputs, _hybrid_mesh(model, ranks), reshard=True)


def hsdp_kept(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """HSDP whose parameters are gathered once per step."""
    return _sharded(model, inputs, _hybrid_mesh(model, ranks), reshard=False)


def shard_layers(model: nn.Module, mesh: DeviceMesh, *, reshard: bool) -> None:
    """`fully_shard` of every layer, then of the model."""
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """What is gathered at a time."""
    if isinstance(model, UNet):
        return [model.stem, *model.down, *model.merge]
    assert isinstance(model, Chain)
    return list(model.layers)


def _hybrid_mesh(model: nn.Module, ranks: int) -> DeviceMesh:
    return init_device_mesh(device_type(model), (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))


def _sharded(model: nn.Module, inputs: Inputs, mesh: DeviceMesh, *, reshard: bool) -> Trained:
    shard_layers(model, mesh, reshard=reshard)
    return trained(model, my_part(inputs), sgd(model.parameters()))
