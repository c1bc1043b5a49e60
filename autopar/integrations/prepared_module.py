"""Prepared modules: what a framework would wrap is compiled, and outputs are what its loop expects.

    module = prepared(model, optimizer, {"dims": {"tp": 2}}, example=batch)
    loss = criterion(module(x), y)         # no loss in the model: its outputs come back as plain whole tensors
    module(**batch).loss.backward()        # a loss in the model: it is plain, other outputs are DTensors until `plain`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import tree_leaves, tree_map_only
from autopar.api import compile as compile_module
from autopar.runtime.parallel_module import ParallelModule


def prepared(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Mapping[str, Any], example: Any = None
) -> ParallelModule:
    """`model` compiled by `autopar.compile` with these options; planned now where there is an example, else at the
    first call. A compiled module stays as it is."""
    if isinstance(model, ParallelModule):
        return model
    given = dict(options)
    module = compile_module(model, given.pop("example_inputs", example), optimizer=optimizer, **given)
    module.register_forward_hook(_whole_outputs)
    return module


def _whole_outputs(module: nn.Module, _: Any, outputs: Any) -> Any:
    """Outputs of a model without a loss in it, from which the loop computes one."""
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return plain(outputs) if tensors and all(isinstance(leaf, DTensor) for leaf in tensors) else outputs


def plain(outputs: Any) -> Any:
    """Every DTensor in `outputs` as a whole plain tensor; every rank calls it."""
    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), outputs)


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an output that lies across ranks."""
    return isinstance(tensor, DTensor)


def compiled_in(module: Any) -> ParallelModule | None:
    """The compiled module that a framework's wrapper holds, or that it is; None where there is none."""
    while isinstance(module, nn.Module) and not isinstance(module, ParallelModule):
        inner = getattr(module, "module", None) or getattr(module, "_forward_module", None)
        if inner is None:
            return None
        module = inner
    return module if isinstance(module, ParallelModule) else None
