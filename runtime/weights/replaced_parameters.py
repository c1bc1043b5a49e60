"""Replaced parameters: an optimizer that was made before `compile`, and not handed over, holds tensors that nothing
trains any more; its first step says so, and so does whoever looks for their gradients.

    optimizer = AdamW(model.parameters());  module = compile(model, batch)                       step(): an error
    optimizer = AdamW(model.parameters());  module = compile(model, batch, optimizer=optimizer)  trains
    weights = list(model.parameters());     module = compile(model, batch)          clip_grad_norm_(weights): an error
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import ConfigurationError
from autopar.runtime.guards.unfit_optimizers import refuse_unfit

_MARK = "autopar_replaced"
_MOVED = "autopar_changes_of_hands"
"""On parameters that moved, how often ranks got or lost some of their module; on optimizers, how often they knew of."""


class ReplacedParameter(nn.Parameter):
    """What a replaced parameter becomes: its values are there, its gradient will never be."""

    @property
    def grad(self) -> torch.Tensor | None:
        """Raises ConfigurationError: clipping, unscaling and zero_grad would find None, and go on."""
        raise ConfigurationError(
            f"{getattr(self, _MARK)} is asked for its gradient, and is a parameter from before autopar.compile, which "
            "nothing trains: take module.parameters() of the compiled module; an optimizer is made from them, or "
            "handed over: autopar.compile(model, ..., optimizer=optimizer)"
        )

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.grad  # noqa: B018 - it raises


def mark_replaced(replaced: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Note on parameters, each given with its name, that a compiled module has others in their place."""
    for name, parameter in replaced:
        setattr(parameter, _MARK, name)
        if type(parameter) is nn.Parameter:
            parameter.__class__ = ReplacedParameter
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    """Once per process."""
    register_optimizer_step_pre_hook(check_optimizer)


def check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before every step of every optimizer. Raises ConfigurationError where its parameters are not those of the module,
    or not such that it can step."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _refuse_without_arrivals(optimizer, held)
    _refuse_replaced(optimizer, held)
    _refuse_left_behind(optimizer, held)
    refuse_unfit(optimizer, held)


def _refuse_replaced(optimizer: torch.optim.Optimizer, held: list[torch.Tensor]) -> None:
    names = [name for parameter in held if (name := getattr(parameter, _MARK, None)) is not None]
    if names:
        raise ConfigurationError(
            f"{len(names)} of the {len(held)} parameters of this {type(optimizer).__name__} are those from before "
            f"autopar.compile ({names[0]}, ...), which nothing trains: make it behind compile, from "
            "module.parameters(), or hand it over: autopar.compile(model, ..., optimizer=optimizer)"
        )


def mark_moved(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer | None, *, hands_changed: bool
) -> None:
    """Note on parameters that they lie otherwise than before, and on the optimizer that went along, if any, that it
    knows. hands_changed: whether ranks got parameters that they did not have, or lost some."""
    held = list(parameters)
    changes = max((getattr(each, _MOVED, 0) for each in held), default=0) + hands_changed
    for each in held:
        setattr(each, _MOVED, changes)
    if optimizer is not None:
        setattr(optimizer, _MOVED, changes)
    _watch_optimizers()


def _refuse_without_arrivals(optimizer: torch.optim.Optimizer, held: list[torch.Tensor]) -> None:
    """An optimizer that stepped before parameters came to this rank, and was not handed over, does not train them."""
    changes = max((getattr(each, _MOVED, 0) for each in held), default=0)
    if optimizer.__dict__.setdefault(_MOVED, changes) < changes:
        raise ConfigurationError(
            f"this {type(optimizer).__name__} was not handed over when parameters of the module went to other ranks: "
            "it does not have those that came here; write module.replan(plan, optimizer), or make a new one from "
            "module.parameters()"
        )


def _refuse_left_behind(optimizer: torch.optim.Optimizer, held: list[torch.Tensor]) -> None:
    """Of parameters that went to another plan, the states must have gone along."""
    for parameter in held:
        if not hasattr(parameter, _MOVED) or parameter not in optimizer.state:
            continue
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, DTensor) and isinstance(parameter, DTensor) and not _lies_beside(value, parameter):
                raise ConfigurationError(
                    f"{key} of a parameter of shape {tuple(parameter.shape)} in an {type(optimizer).__name__} lies as "
                    f"{value.placements} on {value.device_mesh}, and the parameter as {parameter.placements} on "
                    f"{parameter.device_mesh}: the optimizer was not handed over when the module went to another plan; "
                    "write module.replan(plan, optimizer)"
                )


def _lies_beside(value: DTensor, parameter: DTensor) -> bool:
    same = value.shape != parameter.shape or value.placements == parameter.placements
    return same and value.device_mesh == parameter.device_mesh
