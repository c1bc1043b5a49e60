"""Prepared modules: what a framework would wrap is compiled, and outputs are what its loop expects.

    module = prepared(model, optimizer, {"dims": {"tp": 2}}, example=batch)
    loss = criterion(module(x), y)         # no loss in the model: its outputs are read whole
    module(**batch).loss.backward()        # a loss in the model: other outputs are gathered where they are read
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import tree_map_only
from autopar.api import compile as compile_module
from autopar.errors import ConfigurationError
from autopar.integrations.whole_batches import is_keywords
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.step.handed_outputs import LazyOutput, is_handed

_waiting: weakref.WeakKeyDictionary[ParallelModule, list[Callable[[], object]]] = weakref.WeakKeyDictionary()
"""What is done with a module as soon as it is planned."""


def prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Mapping[str, Any], example: Any = None
) -> ParallelModule:
    """`model` compiled by `autopar.compile` with these options. A compiled module stays as it is.

    example: a batch; where it is a dict of what `forward` takes, the module is planned for it now. Else it is planned
    for what its first call passes, for training where there is an optimizer, even if that call is an evaluation."""
    if isinstance(model, ParallelModule):
        return model
    given = dict(options)
    example = given.pop("example_inputs", example if _fits(model, example) or "loss_fn" in given else None)
    module = compile_module(model, example, optimizer=optimizer, **given)

    def before_call(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_planned(module):
            _plan_for(module, args, kwargs, trains=optimizer is not None)
        for action in _waiting.pop(module, ()):
            action()

    module.register_forward_pre_hook(before_call, with_kwargs=True)
    return module


def _fits(model: nn.Module, example: Any) -> bool:
    if not is_keywords(example):
        return False
    try:
        inspect.signature(model.forward).bind(**example)
    except TypeError:
        return False
    return True


def _plan_for(module: ParallelModule, args: Any, kwargs: Any, *, trains: bool) -> None:
    modes = [(each, each.training) for each in module.original.modules()]
    with torch.inference_mode(False), torch.enable_grad():
        if trains:
            module.original.train()
        module.build_for(args, kwargs)
    for each, mode in modes:
        each.training = mode


def is_planned(module: ParallelModule) -> bool:
    """Whether the module has its plan, and with it its parameters."""
    try:
        return bool(module.plan)
    except ConfigurationError:
        return False


def when_planned(module: ParallelModule, action: Callable[[], object]) -> None:
    """Call `action` now, or at the first call of the module, as soon as it is planned; all ranks alike."""
    if is_planned(module):
        action()
    else:
        _waiting.setdefault(module, []).append(action)


def plain(outputs: Any) -> Any:
    """Every output and parameter in `outputs` that lies across ranks as a whole plain tensor; every rank calls it."""
    return tree_map_only((DTensor, LazyOutput), lambda tensor: tensor.full_tensor(), outputs)


def is_output(tensor: torch.Tensor) -> bool:
    """Whether a tensor with a dim is an output of a compiled module, or lies across ranks."""
    return isinstance(tensor, DTensor) or (tensor.dim() > 0 and is_handed(tensor))


def compiled_in(module: Any) -> ParallelModule | None:
    """The compiled module that a framework's wrapper holds, or that it is; None where there is none."""
    while isinstance(module, nn.Module) and not isinstance(module, ParallelModule):
        inner = getattr(module, "module", None) or getattr(module, "_forward_module", None)
        if inner is None:
            return None
        module = inner
    return module if isinstance(module, ParallelModule) else None


def trainer_of(module: ParallelModule, optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """The optimizer that has the module's parameters."""
    mine = {id(p) for p in (module if is_planned(module) else module.original).parameters()}
    return next((o for o in optimizers if any(id(p) in mine for g in o.param_groups for p in g["params"])), None)
