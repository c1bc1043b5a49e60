"""Unfit optimizers: those of torch whose update is wrong, or fails inside of torch, on the parameters of a plan.

    Adafactor(module.parameters())      step(): an error where a weight is split: its means of rows and columns fail
    Rprop(module.parameters())          step(): an error: it mixes its tensors with the parameters' DTensors
    ZeroRedundancyOptimizer(...)        step(): an error: the plan decides which rank updates what
    LBFGS(module.parameters())          step(): an error where a rank holds some stages only: its products need all
    AdamW(bf16_stochastic_round=True)   torchao's; step(): an error where ranks that hold a copy of a weight would round
                                        it differently: blocks of unequal sizes, weights of several stages

Others act on every element alone (Adam, SGD, ...), or by products that DTensor knows (Muon; LBFGS without stages).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import ConfigurationError
from autopar.runtime.parameters import stage_copies

ELSE = "take AdamW, Adam, SGD or another that acts on every element alone"


def refuse_unfit(optimizer: torch.optim.Optimizer, held: Sequence[Tensor]) -> None:
    """held: its parameters. Raises ConfigurationError naming the optimizer, a parameter's layout and the mend."""
    ours = [parameter for parameter in held if isinstance(parameter, DTensor)]
    why = _why_unfit(optimizer, ours)
    if why is not None:
        raise ConfigurationError(f"{_name(optimizer)} cannot step here: {why}")


def _name(optimizer: torch.optim.Optimizer) -> str:
    """torch.optim.AdamW, torchao.optim.AdamW8bit."""
    module = type(optimizer).__module__
    package = module.partition(".")[0]
    return f"{f'{package}.optim' if package in ('torch', 'torchao') else module}.{type(optimizer).__name__}"


def _why_unfit(optimizer: torch.optim.Optimizer, ours: Sequence[DTensor]) -> str | None:
    """Why, and what to do; None where it fits."""
    if not ours:
        return None
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":  # its module is loaded by those who have one
        return "it gives each rank some of the parameters, and the plan has split them already; take what it wraps"
    if isinstance(optimizer, torch.optim.Rprop):
        return f"it mixes tensors of its own with DTensors, whatever their layout; {ELSE}"
    if isinstance(optimizer, torch.optim.LBFGS) and ours[0].device_mesh.size() < _world_size():
        return f"its products need all parameters, and a rank holds those of its stages; plan without pp, or {ELSE}"
    if isinstance(optimizer, torch.optim.Adafactor):
        split = [each for each in ours if not all(placement.is_replicate() for placement in each.placements)]
        if split:
            return (
                f"it needs means of whole rows and columns, and a weight of shape {tuple(split[0].shape)} is stored as "
                f'{split[0].placements}; keep weights whole, dims={{"dp_replicate": -1}}, or {ELSE}'
            )
    return _why_rounded_apart(ours) if getattr(optimizer, "bf16_stochastic_round", False) else None


def _why_rounded_apart(ours: Sequence[DTensor]) -> str | None:
    """Draws come one behind the other, so that those of a weight are the same where as many came before."""
    shared = [each for each in ours if stage_copies(each) > 1]
    if shared:
        return (
            f"it rounds at random, and a weight of shape {tuple(shared[0].shape)} stands in several stages, "
            "whose ranks draw differently; plan without pp, or bf16_stochastic_round=False"
        )
    unequal = [each for each in ours if not _blocks_are_equal(each)]
    if unequal:
        return (
            f"it rounds at random, and a weight of shape {tuple(unequal[0].shape)} is stored as "
            f"{unequal[0].placements} in unequal blocks, behind which ranks draw differently; take sizes that divide, "
            "or bf16_stochastic_round=False"
        )
    return None


def _blocks_are_equal(parameter: DTensor) -> bool:
    """Computed from the shape, so that every rank says the same."""
    mesh, left = parameter.device_mesh, list(parameter.shape)
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined]  # shards of any kind have one
            if left[dim] % (mesh.size(axis) * getattr(placement, "split_factor", 1)):
                return False
            left[dim] //= mesh.size(axis)
    return True


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
