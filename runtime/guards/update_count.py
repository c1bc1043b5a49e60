"""Update count: in front of how many calls the parameters of a module were updated by an optimizer.

    count = UpdateCount(module.parameters());   optimizer.step();   count.read()      # 1
                                                                    count.read()      # 1: nothing happened since

Every rank must have the same count: one that leaves out a step has other weights than the others from then on, without
a word.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_MARK = "autopar_update_count"
NOTHING_TO_UPDATE = -1


class UpdateCount:
    """See the module docstring. Several optimizers that step between two calls count once: a rank of a pipeline may
    hold parameters of some of them only."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch all optimizers for these parameters."""
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._count = 0
        self.stepped = False
        for parameter in self._trained:
            setattr(parameter, _MARK, self)
        _watch_optimizers()

    def read(self) -> int:
        """The count, called once per call of the module; `NOTHING_TO_UPDATE` where this rank holds no parameter that
        is trained."""
        self._count += self.stepped
        self.stepped = False
        return self._count if self._trained else NOTHING_TO_UPDATE


@functools.cache
def _watch_optimizers() -> None:
    """Once per process."""
    register_optimizer_step_post_hook(note_step)


def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """After every step of every optimizer: tell the counts of the parameters that it holds."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = getattr(parameter, _MARK, None)
            if count is not None:
                count.stepped = True
