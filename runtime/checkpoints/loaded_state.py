"""Loaded state: what was read from files, on the host first, and then all of it at once in the module.

    slots = empty_slots(names, state, module)       # host tensors in the layouts that their values will have
    read_tensors(...)                               # may fail
    take(slots, ...)                                # copies; nothing to fail

So a load that fails has changed nothing, at the price of host memory for what this rank holds.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.distributed import tensor as distributed
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

from autopar._compat import dtensor
from autopar.errors import ConfigurationError
from autopar.runtime.checkpoints.manifest import TensorForm
from autopar.runtime.checkpoints.tensor_files import State
from autopar.runtime.checkpoints.training_state import GROUPS, MODEL, RANDOM, form_of, state_entry
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.parameters import local_tensor, unique_parameters

_STEP = "step"
"""The entry of an optimizer's state that counts: a plain number for parameters of any layout."""


def empty_slots(names: Mapping[str, TensorForm | None], state: State, module: ParallelModule) -> State:
    """Tensors to read into, by name: in the layout of the tensor in `state`, or of the parameter whose state it is.

    names: what to read, with the form that it was saved in; where that is None, so is the slot.
    """
    likes = _likes(names, state, module)
    return {name: form and _slot(form, likes[name]) for name, form in names.items()}


def _likes(
    names: Mapping[str, TensorForm | None], state: State, module: ParallelModule
) -> dict[str, torch.Tensor | None]:
    """The tensor whose layout each value has."""
    owners = {name: parameter for parameter, aliases in unique_parameters(module).values() for name in aliases}

    def like(name: str, form: TensorForm | None) -> torch.Tensor | None:
        here, entry = state.get(name), state_entry(name)
        if entry is None or (isinstance(here, torch.Tensor) and form_of(here) == form):
            return here if isinstance(here, torch.Tensor) else None
        return None if entry[1] == _STEP or form is None else owners[entry[0]]

    return {name: like(name, form) for name, form in names.items()}


def _slot(form: TensorForm, like: torch.Tensor | None) -> torch.Tensor:
    dtype = getattr(torch, form.dtype)
    if isinstance(like, DTensor) and form.shape == tuple(like.shape):
        return _host_twin(like, dtype)
    if isinstance(like, DTensor) and form.shape:  # a part of its state that is no block of it, such as sums of rows
        replicated = [TorchReplicate()] * like.device_mesh.ndim
        return distributed.empty(*form.shape, dtype=dtype, device_mesh=like.device_mesh, placements=replicated)
    return torch.empty(form.shape, dtype=dtype)


def _host_twin(like: DTensor, dtype: torch.dtype) -> DTensor:
    spec = like._spec
    if spec.tensor_meta is not None and like.dtype != dtype:
        meta = spec.tensor_meta._replace(dtype=dtype)
        spec = copy.copy(spec)
        spec.tensor_meta = meta
    return dtensor(torch.empty(local_tensor(like).shape, dtype=dtype), spec)


def check_ties(values: State, module: ParallelModule) -> None:
    """Raises ConfigurationError where names of one parameter have values that differ."""
    for _, aliases in unique_parameters(module).values():
        read = [MODEL + name for name in aliases if MODEL + name in values]
        for first, name in pairwise(read):
            if not _same_bits(values[first], values[name]):
                raise ConfigurationError(
                    f"{first} and {name} are one parameter here and two in the checkpoint, with other values: "
                    "load it into a model that does not tie them"
                )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    left, right = (local_tensor(tensor).contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)


def take(
    values: State,
    state: State,
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None,
    kept: Collection[str] = (),
) -> None:
    """Copy the values into the tensors of `state`, and put the others where they belong.

    The state of the optimizer is that of the checkpoint then, also where it has none; but for the parameters `kept`.
    """
    with torch.no_grad():
        for name, value in values.items():
            if name.startswith(MODEL) and isinstance(value, torch.Tensor):
                local_tensor(state[name]).copy_(local_tensor(value))
    module.base_seed = int(values.get(RANDOM + "base_seed", module.base_seed))
    module.calls = int(values.get(RANDOM + "calls", module.calls))
    if optimizer is not None:
        _take_groups(values, optimizer)
        _take_states(values, module, optimizer, kept)


def _take_groups(values: State, optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        prefix = f"{GROUPS}{index}."
        for name, value in values.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                group[key] = _number(group.get(key), value)


def _number(here: Any, value: Any) -> Any:
    """A rate that is a tensor stays that tensor."""
    if isinstance(here, torch.Tensor):
        return here.fill_(float(value))
    return value.item() if isinstance(value, torch.Tensor) else value


def _take_states(
    values: State, module: ParallelModule, optimizer: torch.optim.Optimizer, kept: Collection[str]
) -> None:
    found: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if entry := state_entry(name):
            found.setdefault(entry[0], {})[entry[1]] = value
    on_device = _steps_on_device(optimizer)
    for parameter, aliases in unique_parameters(module).values():
        if aliases[0] in kept:
            continue
        entries = next((found[name] for name in aliases if name in found), {})
        before = optimizer.state.pop(parameter, {})
        if entries:
            optimizer.state[parameter] = {
                key: _placed(before.get(key), value, parameter, key != _STEP or id(parameter) in on_device)
                for key, value in entries.items()
            }


def _steps_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of the parameters whose count of steps lies on their device, as torch.optim.Optimizer has it."""
    groups = [group for group in optimizer.param_groups if group.get("capturable") or group.get("fused")]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _placed(before: Any, value: Any, parameter: torch.Tensor, on_device: bool) -> Any:
    """The value where the optimizer wants it: in the tensor that it had, or else in a new one."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(before, torch.Tensor) and type(before) is type(value) and form_of(before) == form_of(value):
        local_tensor(before).copy_(local_tensor(value))
        return before
    local = local_tensor(value).to(parameter.device) if on_device else local_tensor(value)
    return dtensor(local, value._spec) if isinstance(value, DTensor) else local
