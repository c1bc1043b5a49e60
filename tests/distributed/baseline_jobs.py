"""Jobs of the workers that train the baselines of the plan quality benchmark."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.plan_quality.baselines import BASELINES
from benchmarks.plan_quality.models import gpt
from benchmarks.plan_quality.settings import SEED

STEPS = 3
"""The third loss sees what two optimizer steps have changed, the embedding too."""


def losses_of_all(halved: str | None = None) -> dict[str, list[float]]:
    """The losses of every baseline on a small GPT; `halved` names one whose ranks all see a batch half as long."""
    found = {}
    for name, baseline in BASELINES.items():
        torch.manual_seed(SEED)
        model = gpt(layers=4, width=16, heads=4, vocabulary=32, positions=8)
        inputs = {"x": torch.randint(0, 32, (8, 8)), "labels": torch.randint(0, 32, (8, 8))}
        if name == halved:
            inputs = {key: value[:4] for key, value in inputs.items()}
        one = baseline.build(model, inputs, dist.get_world_size())
        found[name] = [_mean_over_ranks(one.step()) for _ in range(STEPS)]
    return found


def _mean_over_ranks(loss: torch.Tensor | None) -> float:
    """Of the ranks that see one."""
    both = torch.tensor([0.0, 0.0] if loss is None else [float(loss), 1.0], dtype=torch.float64)
    dist.all_reduce(both)
    return float(both[0] / both[1])
