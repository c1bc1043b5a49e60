"""Optimizer draws: an optimizer that rounds at random draws the same numbers on every rank that holds a block.

    AdamW(module.parameters(), bf16_stochastic_round=True)     torchao's: a weight of bf16 goes up or down by chance

Ranks that hold copies of a block must round it alike, or they train different weights from then on, and nobody sees it.
So the draws of every such step begin at a seed of the module and of the number of the step, on all ranks; behind the
step torch's generator goes on where it was. Blocks of other ranks have the same draws, and other values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_MARK = "autopar_optimizer_draws"
_STRIDE = 7_368_787  # a prime, as of the seeds of calls
_SEED_BITS = 63


def draws_at_random(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step rounds by chance."""
    return bool(getattr(optimizer, "bf16_stochastic_round", False))


class OptimizerDraws:
    """See the module docstring; of one module. Ranks step alike, so that a count on each is one of all."""

    def __init__(self, parameters: Iterable[nn.Parameter], seed: int) -> None:
        """Watch all optimizers for these parameters. seed: the same on all ranks."""
        self._seed, self._steps = seed, 0
        self._before: tuple[torch.Tensor, list[torch.Tensor]] | None = None
        for parameter in parameters:
            setattr(parameter, _MARK, self)
        _watch_optimizers()

    def begin(self) -> None:
        """In front of a step."""
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self._before = torch.get_rng_state(), devices
        self._steps += 1
        torch.manual_seed((self._seed + self._steps * _STRIDE) % (1 << _SEED_BITS))

    def end(self) -> None:
        """Behind it."""
        if self._before is not None:
            host, devices = self._before
            torch.set_rng_state(host)
            torch.cuda.set_rng_state_all(devices)
            self._before = None


@functools.cache
def _watch_optimizers() -> None:
    """Once per process."""
    register_optimizer_step_pre_hook(lambda optimizer, *_: _each(optimizer, OptimizerDraws.begin))
    register_optimizer_step_post_hook(lambda optimizer, *_: _each(optimizer, OptimizerDraws.end))


def _each(optimizer: torch.optim.Optimizer, act: Any) -> None:
    if not draws_at_random(optimizer):
        return
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    draws = next((found for each in held if (found := getattr(each, _MARK, None)) is not None), None)
    if draws is not None:
        act(draws)


def share_draws(parameters: Iterable[nn.Parameter]) -> None:
    """Parameters of a module that came to this rank are watched as those that it had."""
    held = list(parameters)
    draws = next((found for each in held if (found := getattr(each, _MARK, None)) is not None), None)
    for each in held if draws is not None else ():
        setattr(each, _MARK, draws)
