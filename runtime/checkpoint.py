"""Checkpoint: save under one plan and world size, load under another.

    autopar.save("step-1000", module, optimizer)
    autopar.load("step-1000", module, optimizer)        # any plan, any number of processes

The files are those of torch.distributed.checkpoint, with parameters and optimizer state under original names. It
stores contiguous blocks only, so tensors in strided layouts (fused q|k|v over tensor-parallel ranks) are written in
plain blocks of the same dim and put back when loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard

from autopar._compat import StridedShard, tree_map_only
from autopar.errors import ConfigurationError
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.parameters import full_tensor, unique_parameters

State = dict[str, Any]
SEEDS = 1 << 63
"""Seeds of draws count modulo this (`ParallelModule.seed`). That of a process which nobody seeded may be above it, and
above what an integer tensor holds."""


def save(path: str | Path, module: ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write parameters, buffers, optimizer state and the state of the random draws to the folder `path`."""
    with HERE.inside("save"):
        state_dict_saver.save(in_plain_blocks(_state(module, optimizer)), checkpoint_id=str(path))


def load(path: str | Path, module: ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Read what `save` wrote into the module and the optimizer, each tensor in the layout that it has here.

    Raises ConfigurationError where the folder holds no checkpoint of this model.
    """
    with HERE.inside("load"):
        _load(path, module, optimizer)


def _load(path: str | Path, module: ParallelModule, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None and not optimizer.state:
        _materialise_state(optimizer)
    state = _state(module, optimizer)
    blocks = in_plain_blocks(state)
    try:
        state_dict_loader.load(blocks, checkpoint_id=str(path))
    except (OSError, CheckpointException, RuntimeError) as error:
        raise ConfigurationError(f"cannot load a checkpoint of this model from {path}: {error}") from error
    _put_back(state, blocks, module, optimizer)


def _state(module: ParallelModule, optimizer: torch.optim.Optimizer | None) -> State:
    state: State = {
        "model": module.state_dict(),
        "random": {"base_seed": torch.tensor(module.base_seed % SEEDS), "calls": torch.tensor(module.calls)},
    }
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(module, optimizer)
    return state


def _optimizer_state(module: ParallelModule, optimizer: torch.optim.Optimizer) -> State:
    """Optimizer state by parameter name, and the numbers of each group by position."""
    names = {id(parameter): aliases[0] for parameter, aliases in unique_parameters(module).values()}
    tensors = {
        names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items() if id(parameter) in names
    }
    groups = {
        str(index): {key: value for key, value in group.items() if key != "params"}
        for index, group in enumerate(optimizer.param_groups)
    }
    return {"state": tensors, "groups": groups}


def _materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that never stepped make its state, by a step of size zero on zero gradients."""
    kept = [(parameter, parameter.grad) for group in optimizer.param_groups for parameter in group["params"]]
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    for parameter, _ in kept:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    optimizer.step()
    for parameter, gradient in kept:
        parameter.grad = gradient
    for group, rate in rates:
        group["lr"] = rate


def in_plain_blocks(state: Any) -> Any:
    """The state with every strided DTensor as one of contiguous blocks of the same dim; others are shared."""
    return tree_map_only(DTensor, _plain_blocks, state)


def _plain_blocks(tensor: DTensor) -> DTensor:
    if not any(isinstance(placement, StridedShard) for placement in tensor.placements):
        return tensor
    plain = [TorchShard(p.dim) if isinstance(p, StridedShard) else p for p in tensor.placements]
    return distribute_tensor(full_tensor(tensor), tensor.device_mesh, plain, src_data_rank=None)


def _put_back(state: State, blocks: State, module: ParallelModule, optimizer: torch.optim.Optimizer | None) -> None:
    _copy_strided(state, blocks)
    module.base_seed = int(blocks["random"]["base_seed"])
    module.calls = int(blocks["random"]["calls"])
    if optimizer is None:
        return
    for index, group in enumerate(optimizer.param_groups):
        group.update(blocks["optimizer"]["groups"][str(index)])


def _copy_strided(state: Any, blocks: Any) -> None:
    """Copy tensors that were loaded into a stand-in back into the tensor of the state."""
    for key, value in state.items():
        if isinstance(value, dict):
            _copy_strided(value, blocks[key])
        elif isinstance(value, DTensor) and value is not blocks[key]:
            with torch.no_grad():
                value.copy_(blocks[key].redistribute(placements=value.placements))
