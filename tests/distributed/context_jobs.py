"""Jobs of the workers that train every way of the benchmark of context parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.hardware.cluster import Cluster
from benchmarks.context_parallelism.alternatives import make_plans
from benchmarks.context_parallelism.by_hand import BY_HAND
from benchmarks.context_parallelism.settings import Sizes, setting
from benchmarks.plan_quality.baselines.trained import Trained, sgd, trained
from benchmarks.plan_quality.captured import Captured

STEPS = 3
"""The third loss sees what two optimizer steps have changed."""
TINY = setting(Sizes(batch=2, length=32, layers=1, width=16, heads=4, kv_heads=2), "flat-1gbit")


def losses_of_all_ways(spoiled: str) -> dict[str, list[float]]:
    """The losses of one rank alone, of our plans and of what is written by hand; `spoiled` names one of the latter
    whose ranks all see sequences half as long."""
    plans, left_out = make_plans(TINY, Cluster.parse(f"{dist.get_world_size()} cpu"))
    assert all("the same plan" in reason for reason in left_out.values()), left_out
    captured = Captured(TINY)
    found = {}
    for name, plan in plans.items():
        module = captured.module(plan)
        found[name] = mean_losses(trained(module, captured.inputs, sgd(module.parameters())))
    for name, baseline in BY_HAND.items():
        model, inputs = TINY.model_and_inputs()
        if name == spoiled:
            inputs = {key: value[:, :16] for key, value in inputs.items()}
        found[name] = mean_losses(baseline.build(model, inputs, dist.get_world_size()))
    model, inputs = TINY.model_and_inputs()
    found["alone"] = mean_losses(trained(model, inputs, sgd(model.parameters())))
    return found


def mean_losses(run: Trained) -> list[float]:
    """Means over the ranks."""
    means = []
    for _ in range(STEPS):
        loss = run.step()
        assert loss is not None
        mean = loss.to(torch.float64)
        dist.all_reduce(mean)
        means.append(float(mean) / dist.get_world_size())
    return means
