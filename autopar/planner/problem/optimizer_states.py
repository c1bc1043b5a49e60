"""What an optimizer costs: bytes of state per parameter element, and bytes that a step reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.cost_models.device_memory import optimizer_state_bytes
from autopar.cost_models.operator_costs import OPTIMIZER, SGD
from autopar.cost_models.optimizer_step import DeviceKind, temporaries_of
from autopar.errors import ConfigurationError
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.program import Program

ASSUMED_OPTIMIZER = "AdamW"
"""Planned for when the user names none: the usual and the most expensive of the common choices."""


EIGHT_BIT_STATE_BYTES: Mapping[str, float] = {"AdamW8bit": 2.0, "Adam8bit": 2.0, "Lion8bit": 1.0}
"""Bytes of state per element of optimizers with 8-bit moments (bitsandbytes), whatever the parameter's dtype. Their
scales, one float32 per block of 256 elements, are 2 % of that."""
EIGHT_BIT_SCALES = 1.0 + 4.0 / 256.0


def resolve_optimizer(
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer | Callable[..., Any] | None,
) -> tuple[str | type[torch.optim.Optimizer], Mapping[str, Any]]:
    """(class or table name, options) of an optimizer given by name, class, instance or factory."""
    if optimizer is None:
        return ASSUMED_OPTIMIZER, {}
    if isinstance(optimizer, str):
        return optimizer, {}
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer, {}
    if isinstance(optimizer, functools.partial) and isinstance(optimizer.func, type):
        return optimizer.func, dict(optimizer.keywords)
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ConfigurationError(f"optimizer={optimizer!r} is no torch.optim class, instance, factory or name")
        factory: Callable[..., Any] = optimizer
        made = factory([torch.nn.Parameter(torch.zeros(2, 2))])
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigurationError(f"the optimizer factory returned {type(made).__name__}")
        optimizer = made
    known = {"momentum", "amsgrad", "centered"}
    return type(optimizer), {key: value for key, value in optimizer.defaults.items() if key in known and value}


def state_bytes(program: Program, optimizer: Any, device_kind: DeviceKind = "cpu") -> dict[str, StateBytes]:
    """Per parameter name; those that are frozen, or that nothing of a training step reads, have neither gradient nor
    state: optimizers leave out what has no gradient."""
    kind, options = resolve_optimizer(optimizer)
    updated = {output.name for output in program.outputs if output.role == "gradient"}
    found = {}
    for entry in program.inputs:
        if entry.role != "parameter":
            continue
        is_idle = program.training and entry.name not in updated
        if is_idle or not entry.requires_grad or not entry.dtype.is_floating_point:
            found[entry.name] = StateBytes(gradient=0.0, optimizer=0.0, step_traffic=0.0)
            continue
        size = entry.dtype.itemsize
        state = _state_bytes(kind, entry.dtype, options)
        buffers = temporaries_of(_name(kind))
        found[entry.name] = StateBytes(
            gradient=size,
            optimizer=state,
            step_traffic=3 * size + 2 * state,
            step_curve=SGD if _name(kind) == "SGD" else OPTIMIZER,
            step_buffers=buffers,
            update=buffers.foreach * size if device_kind == "cuda" else 0.0,
        )
    return found


def _state_bytes(
    kind: str | type[torch.optim.Optimizer], parameter_dtype: torch.dtype, options: Mapping[str, Any]
) -> float:
    name = _name(kind)
    if name in EIGHT_BIT_STATE_BYTES:
        return EIGHT_BIT_STATE_BYTES[name] * EIGHT_BIT_SCALES
    return optimizer_state_bytes(kind, parameter_dtype=parameter_dtype, options=options)


def _name(kind: str | type[torch.optim.Optimizer]) -> str:
    return kind if isinstance(kind, str) else kind.__name__
