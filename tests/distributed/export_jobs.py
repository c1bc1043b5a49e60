"""Jobs of the workers: code that `autopar export` wrote, on a small Llama, beside the plain model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.models import llama, token_inputs

VOCABULARY, BATCH, LENGTH = 96, 8, 16


def small_llama() -> nn.Module:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return llama(layers=2, width=32, hidden=64, heads=4, kv_heads=4, vocabulary=VOCABULARY, positions=LENGTH)


def batch() -> dict[str, torch.Tensor]:
    return token_inputs(VOCABULARY)(BATCH, LENGTH)


def run_exported(code: str, parts: int, forget: bool = False) -> tuple[float, float]:
    """Errors of the loss and, relative, of the worst gradient; parts: the batch is cut over so many groups of ranks.

    forget: every group takes the first part.
    """
    reference = small_llama()
    plain = reference(**batch()).loss
    plain.backward()
    names: dict[str, Any] = {}
    exec(compile(code, "exported.py", "exec"), names)
    model = names["parallelize"](small_llama(), "cpu")
    own = 0 if forget else dist.get_rank() * parts // dist.get_world_size()
    loss = model(**{name: tensor.chunk(parts)[own] for name, tensor in batch().items()}).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    expected = dict(reference.named_parameters())
    errors = [
        float((_whole(parameter.grad) - expected[name].grad).norm() / expected[name].grad.norm())
        for name, parameter in model.named_parameters()
    ]
    return abs(float(mean) / dist.get_world_size() - float(plain.detach())), max(errors)


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
