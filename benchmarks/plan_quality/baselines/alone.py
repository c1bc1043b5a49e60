"""One rank trains the whole batch: what every parallel plan must beat, and on slow networks often does not."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.plan_quality.baselines.trained import Trained, sgd, trained
from benchmarks.plan_quality.settings import Inputs


def alone(model: nn.Module, inputs: Inputs, ranks: int) -> Trained:
    """Rank 0 computes; the others wait for the end of the step."""
    if dist.get_rank() == 0:
        return trained(model, inputs, sgd(model.parameters()))

    def wait() -> torch.Tensor | None:
        return None

    return Trained(step=wait)
