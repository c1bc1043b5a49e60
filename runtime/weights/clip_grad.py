"""Clip gradients by their global norm, whatever layouts they have.

    autopar.clip_grad_norm_(module.parameters(), 1.0)      # one all-reduce for all parameters together

Each rank adds up the squares of its blocks, weighted so that a block that several ranks hold counts once. The stock
`torch.nn.utils.clip_grad_norm_` gives the same number, with one collective per parameter, where every rank holds all
parameters; in a pipeline, and for logical shards, it raises GradientError (`weights/stage_gradients.py`). For these
norms are sums of integers (`exact_norms.py`): equal bits on any number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import ConfigurationError
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.parameters import is_in_shards, local_tensor, stage_copies
from autopar.runtime.weights.exact_norms import exact_norm


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale all gradients in place so that their joint norm is at most `max_norm`; returns the norm before (0-dim).

    norm_type: any p > 0 or infinity. Raises ConfigurationError for other values.
    """
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type={norm_type} must be positive or infinity")
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    trained = [parameter for parameter in given if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    distributed = dist.is_initialized() and any(isinstance(parameter, DTensor) for parameter in given)
    if not gradients and not distributed:
        return torch.tensor(0.0)
    device = local_tensor(given[0]).device
    with HERE.inside("clip_grad_norm_") if distributed else nullcontext():
        if any(map(is_in_shards, given)):
            blocks = [local_tensor(gradient) for gradient in gradients if _counts_here(gradient, distributed)]
            norm = torch.tensor(exact_norm(blocks, norm_type, device, distributed), dtype=torch.float32, device=device)
        else:
            norm = _total_norm(gradients, [stage_copies(p) for p in trained], norm_type, device, distributed)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if gradients:
        torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], scale)
    return norm


def _total_norm(
    gradients: list[torch.Tensor], copies: list[int], norm_type: float, device: torch.device, distributed: bool
) -> torch.Tensor:
    """copies: rank groups of a pipeline that hold each; a rank of a frozen stage has no gradient and takes part."""
    blocks = [local_tensor(gradient).detach() for gradient in gradients]
    if math.isinf(norm_type):
        peaks = [block.abs().max().float() for block in blocks if block.numel()]
        norm = torch.stack(peaks).max() if peaks else torch.zeros((), device=device)
        if distributed:
            dist.all_reduce(norm, dist.ReduceOp.MAX)
        return norm
    powers = [
        _norm(block, norm_type) ** norm_type / (holders(gradient) * count)
        for block, gradient, count in zip(blocks, gradients, copies, strict=True)
    ]
    total = torch.stack(powers).sum() if powers else torch.zeros((), device=device)
    if distributed:
        dist.all_reduce(total)
    return total ** (1.0 / norm_type)


def _counts_here(gradient: torch.Tensor, distributed: bool) -> bool:
    """Whether this rank counts its block of a gradient: of copies, the first rank its own."""
    return not distributed or holders(gradient) == 1 or dist.get_rank() == 0


def _norm(block: torch.Tensor, norm_type: float) -> torch.Tensor:
    """In float32 on every rank, summed in the block's own type where that is wider."""
    norm: torch.Tensor = torch.linalg.vector_norm(
        block, norm_type, dtype=torch.promote_types(block.dtype, torch.float32)
    )
    return norm.float()


def holders(gradient: torch.Tensor) -> int:
    """How many ranks hold a copy of each element: the sizes of the axes that replicate it."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    mesh = gradient.device_mesh
    return math.prod(mesh.size(axis) for axis, placement in enumerate(gradient.placements) if placement.is_replicate())
