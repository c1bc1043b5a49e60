"""Jobs of the workers that train every way of the benchmark of expert parallelism."""

from __future__ import annotations

import re
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from benchmarks.expert_parallelism import by_hand
from benchmarks.expert_parallelism.alternatives import make_plans
from benchmarks.expert_parallelism.settings import Sizes, build, measured_loads, setting, tokens
from benchmarks.plan_quality.baselines.trained import my_part, sgd, trained
from benchmarks.plan_quality.captured import Captured
from tests.distributed.context_jobs import mean_losses

SIZES = Sizes(batch=4, length=8, layers=1, width=16, heads=2, hidden=24, experts=8, chosen=2, exponent=1.0)
TINY = setting(SIZES, "flat-1gbit")


def losses_of_all_ways() -> dict[str, list[float]]:
    """The losses of one rank alone, of our plans and of what is written by hand."""
    made: list[tuple[dict[str, Plan], dict[str, str]] | None] = [None]
    if dist.get_rank() == 0:
        made = [make_plans(TINY, Cluster.parse(f"{dist.get_world_size()} cpu"), measured_loads(SIZES))]
    dist.broadcast_object_list(made)
    assert made[0] is not None
    plans, left_out = made[0]
    assert all("the same plan" in reason for reason in left_out.values()), left_out
    captured = Captured(TINY)
    found = {}
    for name, plan in plans.items():
        module = captured.module(plan)
        found[name] = mean_losses(trained(module, captured.inputs, sgd(module.parameters())))
    for name, baseline in by_hand.BY_HAND.items():
        found[name] = mean_losses(baseline.build(*TINY.model_and_inputs(), dist.get_world_size()))
    model, inputs = TINY.model_and_inputs()
    found["alone"] = mean_losses(trained(model, inputs, sgd(model.parameters())))
    return found


def gradients_by_hand(spoiled: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loss and gradients that this rank has by hand, and of one rank alone its part of these, in fp64; spoiled:
    gradients of experts stay sums over the ranks."""
    ranks = dist.get_world_size()
    group = dist.new_group(list(range(ranks)))
    torch.manual_seed(0)
    model = build(SIZES).double()
    with patch.object(by_hand, "average_gradients", lambda *_: None) if spoiled else patch.dict({}):
        module = by_hand.ExpertParallel(model, group)
    loss = module(**my_part(tokens(SIZES)))
    loss.backward()
    mine = {name.removeprefix("rest.module."): each.grad for name, each in module.named_parameters()}
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    torch.manual_seed(0)
    alone = build(SIZES).double()
    whole = alone(**tokens(SIZES))
    whole.backward()
    blocks = {name: each.grad.chunk(ranks)[dist.get_rank()] if ".experts." in name else each.grad
              for name, each in alone.named_parameters() if each.grad is not None}  # fmt: skip
    wanted = {re.sub(r"layers\.(\d+)\.\w+\.experts", r"own.\1", name): grad for name, grad in blocks.items()}
    return {**mine, "loss": mean / ranks}, {**wanted, "loss": whole.detach()}
