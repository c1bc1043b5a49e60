"""Whole weights: the state and the model that one process would have, from the parts of all ranks.

    whole_state(module.original, module.absent, device)     name -> whole tensor, tied ones as one
    plain_copy(module.original, module.absent, tensors)     the original model with whole tensors as its weights

The first is called by all ranks, and gathers one tensor at a time. Where rank 0 alone keeps them, they lie on its CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.runtime.consensus import from_every_rank
from autopar.runtime.parameters import full_tensor, set_parameter
from autopar.runtime.process_groups import rank
from autopar.runtime.weights.found_weights import WantedTensor


def whole_state(
    model: nn.Module,
    absent: Mapping[str, nn.Parameter],
    device: torch.device,
    *,
    in_stages: bool = False,
    only_on_rank_0: bool = False,
    tensors: bool = False,
) -> dict[str, Any]:
    """`state_dict()` of the plain model, in its order, in tensors of its own; other ranks than 0 may get an empty dict.

    tensors: every parameter and buffer instead, buffers among them that belong to no state. in_stages: whether ranks
    hold different parameters; absent: those that this one does not.
    """
    keeps = rank() == 0 or not only_on_rank_0
    held: Mapping[str, Any] = {**(_tensors(model) if tensors else model.state_dict(keep_vars=True)), **absent}
    names: dict[int, str] = {}
    for name, value in held.items():
        names.setdefault(id(value), name)
    own = {name: _own(held[name], keeps or in_stages) for name in names.values() if name not in absent}
    if in_stages:
        own |= from_every_rank({n: value for n, value in own.items() if isinstance(value, torch.Tensor)}, device)
    if not keeps:
        return {}
    if only_on_rank_0:
        own = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in own.items()}
    return {name: own[names[id(held[name])]] for name in _in_order(model, held)}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _own(value: Any, keeps: bool) -> Any:
    """The whole of a value, of this process's own; None where it is not kept."""
    whole = full_tensor(value.detach()) if isinstance(value, torch.Tensor) else value
    if not keeps:
        return None
    return whole.clone() if isinstance(whole, torch.Tensor) else copy.deepcopy(whole)


def whole_tensors(
    wanted: Sequence[WantedTensor], absent: Mapping[str, nn.Parameter], device: torch.device, *, in_stages: bool
) -> Iterator[torch.Tensor]:
    """The whole of one tensor after the other, on every rank; all ranks go through all of them, in one order."""
    for each in wanted:
        name = each.names[0]
        own = {} if name in absent else {name: full_tensor(each.tensor.detach())}
        yield (from_every_rank(own, device) if in_stages else own)[name]


def _in_order(model: nn.Module, held: Mapping[str, Any]) -> list[str]:
    """The names of `held` in the order of the plain model's state."""
    found: dict[str, None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found |= {prefix + name: None for name in (*module._parameters, *module._buffers) if prefix + name in held}
    return [*found, *(name for name in held if name not in found)]


def plain_copy(model: nn.Module, absent: Mapping[str, nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of `model` whose parameters and buffers are the whole `tensors`. Tied ones stay tied."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        memo[id(parameter)] = nn.Parameter(tensors[name], requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = tensors[name]
    made = copy.deepcopy(model, memo)
    elsewhere: dict[int, nn.Parameter] = {}
    for name, empty in absent.items():
        if id(empty) not in elsewhere:
            elsewhere[id(empty)] = nn.Parameter(tensors[name], requires_grad=empty.requires_grad)
        set_parameter(made, name, elsewhere[id(empty)])
    made.training = model.training  # submodules have their own
    return made


def without_weights(
    model: nn.Module, training: bool, absent: Mapping[str, nn.Parameter] = MappingProxyType({})
) -> nn.Module:
    """A copy of `model` whose parameters and buffers are meta tensors of the global shapes; ties are kept.

    absent: parameters that stand in it, by name, though `model` does not hold them.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    for module in model.modules():  # attributes that a hook computes before each forward (weight_norm)
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    skeleton = copy.deepcopy(model, memo)
    for name, parameter in absent.items():
        set_parameter(skeleton, name, parameter)
    skeleton.training = training
    return skeleton
