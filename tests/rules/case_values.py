"""What cases of rules are made of: `Case`, and values that are signed, distinct and fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten
autopar_ops = torch.ops.autopar
Arguments = tuple[Any, ...]

# the operator has no CPU kernel; its decomposition stands in
_CPU_KERNELS = torch.library.Library("aten", "IMPL", "CPU")
_RMS_NORM_BACKWARD = aten._fused_rms_norm_backward.default
_CPU_KERNELS.impl(_RMS_NORM_BACKWARD, get_decompositions([_RMS_NORM_BACKWARD])[_RMS_NORM_BACKWARD])


@dataclass(frozen=True, eq=False)
class Case:
    """name: of the test; build(size): positional arguments; kwargs: keyword arguments."""

    name: str
    target: Any
    build: Callable[[int], Arguments]
    kwargs: dict[str, Any]


def x(*shape: int) -> Tensor:
    """Distinct signed fp64 values."""
    return torch.randn(shape, dtype=torch.float64)


def ids(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape)


def distinct(limit: int, *shape: int) -> Tensor:
    """Positions without repetition along the last dim."""
    return torch.rand(*shape[:-1], limit).argsort(-1)[..., : shape[-1]]


def bools(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.4


def case(target: Any, build: Callable[[int], Arguments], label: str = "", **kwargs: Any) -> Case:
    return Case(f"{target}{'/' if label else ''}{label}", target, build, kwargs)
