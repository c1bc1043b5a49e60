"""Bytes of one device: optimizer state per parameter element. What a device can hold: `usable_memory.py`.

optimizer_state_bytes("AdamW")    # 8: two moments in float32
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.errors import ConfigurationError

OPTIMIZER_STATE_BYTES: Mapping[str, float] = {
    "SGD": 0,
    "SGD+momentum": 4,
    "Adam": 8,
    "AdamW": 8,
    "Adam+amsgrad": 12,
    "AdamW+amsgrad": 12,
    "NAdam": 8,
    "RAdam": 8,
    "Adamax": 8,
    "Adagrad": 4,
    "RMSprop": 4,
    "Adadelta": 8,
    "Rprop": 8,
    "ASGD": 4,
    "Lion": 4,
    "Muon": 4,
    "Adafactor": 0,
}
"""State bytes per element of a float32 parameter, from the update rules; the test measures each torch class.
Adafactor keeps a row and a column of a matrix: nothing per element."""

LBFGS_TENSORS = 2 * 100 + 2
"""Of the size of all parameters, once torch.optim.LBFGS has its history: steps and changes of the gradient, a hundred
of each by default, the direction and the last gradient. It is no step that could be measured without a closure."""

MASTER_PARAMETER_BYTES = 4
"""float32 master copy of a parameter that is stored in 16 bits."""


def optimizer_state_bytes(
    optimizer: str | type[torch.optim.Optimizer],
    *,
    parameter_dtype: torch.dtype = torch.float32,
    float32_master: bool = False,
    options: Mapping[str, Any] | None = None,
) -> float:
    """State bytes per parameter element; `options` are the optimizer's arguments (momentum, amsgrad).

    Moments take the parameter's dtype, as torch's optimizers do, unless `float32_master` keeps a float32 copy
    (then moments are float32 and the copy counts 4 bytes more). A class outside the table is measured by one
    step on a small CPU parameter. Raises ConfigurationError for an unknown name.
    """
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    key = _table_key(name, options or {})
    state_dtype = torch.float32 if float32_master else parameter_dtype
    master = MASTER_PARAMETER_BYTES if float32_master and parameter_dtype != torch.float32 else 0
    if key is not None:
        return OPTIMIZER_STATE_BYTES[key] * state_dtype.itemsize / torch.float32.itemsize + master
    if name == "LBFGS":
        return LBFGS_TENSORS * state_dtype.itemsize + master
    if isinstance(optimizer, str):
        raise ConfigurationError(
            f"unknown optimizer {optimizer!r}: pass its class, or one of {', '.join(OPTIMIZER_STATE_BYTES)}"
        )
    return measured_state_bytes(optimizer, parameter_dtype=state_dtype, options=options) + master


def measured_state_bytes(
    optimizer: type[torch.optim.Optimizer],
    *,
    parameter_dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
) -> float:
    """State bytes per element after one step, by the difference of two sizes (scalars cancel)."""
    small, large = 64, 128

    def state_bytes(rows: int) -> int:
        parameter = torch.nn.Parameter(torch.zeros(rows, rows, dtype=parameter_dtype))
        parameter.grad = torch.ones_like(parameter)
        instance = optimizer([parameter], **(options or {}))
        instance.step()
        return sum(_tensor_bytes(value) for value in instance.state[parameter].values())

    slope = (state_bytes(large) - state_bytes(small)) / (large * large - small * small)
    # what grows with the rows alone (factored state) vanishes per element of a real matrix
    return float(round(slope, 1))


def _table_key(name: str, options: Mapping[str, Any]) -> str | None:
    wanted = {known.lower(): known for known in OPTIMIZER_STATE_BYTES}
    suffixes: Sequence[str] = [f"+{flag}" for flag in ("momentum", "amsgrad") if options.get(flag)]
    return wanted.get((name + "".join(suffixes)).lower()) if suffixes else wanted.get(name.lower())


def _tensor_bytes(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
