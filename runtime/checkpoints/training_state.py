"""Training state: every value of a run under one flat name.

    flat_state(module, optimizer)
        model.0.weight                       DTensor         parameters and buffers
        optimizer.state.0.weight.exp_avg     DTensor         by the first name of the parameter
        optimizer.groups.0.lr                0.001           the numbers of each group, by its position
        random.calls                         tensor          with base_seed: what the next random draws depend on

A rank of a pipeline has the values of its own stages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._compat import tree_leaves
from autopar.errors import ConfigurationError
from autopar.runtime.checkpoints.manifest import TensorForm
from autopar.runtime.checkpoints.tensor_files import State, is_plain
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.parameters import unique_parameters

MODEL, RANDOM, EXTRA = "model.", "random.", "extra."
OPTIMIZER, STATE, GROUPS = "optimizer", "optimizer.state.", "optimizer.groups."
SEEDS = 1 << 63
"""Seeds of draws count modulo this (`ParallelModule.seed`). That of a process which nobody seeded may be above it, and
above what an integer tensor holds."""
EXTRA_STATE = "_extra_state"
"""The last part of the names under which torch keeps what `get_extra_state` of a module returns."""
_OF_PARAMETERS = ("params", "param_names")
"""Entries of an optimizer's group that name its parameters."""


def flat_state(module: ParallelModule, optimizer: torch.optim.Optimizer | None) -> State:
    """What this rank has, by name; tensors are shared. Raises ConfigurationError for what cannot be written."""
    state = {MODEL + name: _as_object(name, value) for name, value in module.state_dict().items()}
    state[RANDOM + "base_seed"] = torch.tensor(module.base_seed % SEEDS)
    state[RANDOM + "calls"] = torch.tensor(module.calls)
    if optimizer is not None:
        state |= _optimizer_state(module, optimizer)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            check_plain(name, value)
    return state


def _as_object(name: str, value: Any) -> Any:
    """In a list, a tensor that a module computed as its extra state is no tensor to read into."""
    return [value] if name.rpartition(".")[2] == EXTRA_STATE else value


def _optimizer_state(module: ParallelModule, optimizer: torch.optim.Optimizer) -> State:
    names = names_of(module)
    state: State = {}
    for parameter, values in optimizer.state.items():
        if id(parameter) not in names:
            raise ConfigurationError(
                f"the optimizer has state of a tensor {list(parameter.shape)} that is no parameter of this module: "
                "give each module an optimizer of its own, and save them apart"
            )
        state |= {f"{STATE}{names[id(parameter)]}.{key}": value for key, value in values.items()}
    for index, group in enumerate(optimizer.param_groups):
        state |= {f"{GROUPS}{index}.{key}": value for key, value in group.items() if key not in _OF_PARAMETERS}
    return state


def names_of(module: nn.Module) -> dict[int, str]:
    """id(parameter) -> its first name."""
    return {id(parameter): aliases[0] for parameter, aliases in unique_parameters(module).values()}


def group_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The parameters of each group that this rank holds, by their first names."""
    names = names_of(module)
    return [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]


def state_entry(name: str) -> tuple[str, str] | None:
    """(parameter, key) of a value of an optimizer's state; None for other values."""
    parameter, _, key = name.removeprefix(STATE).rpartition(".")
    return (parameter, key) if name.startswith(STATE) else None


def form_of(value: Any) -> TensorForm | None:
    """Global shape and dtype of a tensor, None for other values."""
    if not isinstance(value, torch.Tensor):
        return None
    return TensorForm(shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))


def check_plain(name: str, value: Any) -> None:
    """Raises ConfigurationError where `value` would not be read back as it is: objects of classes, and tensors that
    are spread over ranks."""
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
        raise ConfigurationError(f"{name} holds a DTensor, of which each rank has a part: save its full_tensor()")
    if not is_plain(value):
        strange = next((leaf for leaf in tree_leaves(value) if not is_plain(leaf)), value)
        raise ConfigurationError(
            f"{name} holds a {type(strange).__module__}.{type(strange).__qualname__}, which is not read back as data: "
            "save numbers, words, tensors, and lists and dicts of them"
        )
