"""Jobs of the workers that build the model from another seed on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor
from autopar.runtime.weights import shard_model
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.models import captured_tied, tied_model, tokens
from tests.distributed.pipeline_jobs import captured as captured_case
from tests.distributed.pipeline_jobs import gathered
from tests.distributed.pipeline_models import CASES


class Fused(nn.Module):
    """A product whose columns are three parts, which tensor parallelism stores in strides, and a running mean.
    forward(x (B, 16)) -> scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.fused(x).chunk(3, dim=-1)
        return self.norm(self.out(torch.tanh(q * k) + v)).pow(2).mean() + self.norm.running_mean.sum()


def fused(seed: int) -> Fused:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    model = Fused()
    model.norm.running_mean.fill_(float(seed))
    return model


BATCH = (torch.linspace(-1.0, 1.0, 128).view(8, 16),)


def captured_fused(**_: Any) -> bool:
    """Capture the fused model."""
    return capture_once("fused", fused(0), BATCH)


def _error(module: nn.Module, reference: nn.Module) -> float:
    """Largest difference of a parameter or buffer, by its first name."""
    mine = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    plain = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    return max(float((full_tensor(mine[name].detach()) - value.detach()).abs().max()) for name, value in plain.items())


@prepared_by(captured_tied)
def seeded_apart(dims: dict[str, int], planted: bool = False) -> float:
    """Largest difference of the weights from those of rank 0. planted: the mutation that sends nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(shard_model, "agree_on_weights", lambda *_: None)
        module = compile_once("tied model", tied_model(seed=dist.get_rank()), tokens(0), dims=dims)
    return _error(module, tied_model(seed=0))


@prepared_by(captured_fused)
def fused_apart(dims: dict[str, int]) -> tuple[float, bool]:
    """The same with strided blocks and a buffer that differs; whether any block is strided."""
    module = compile_once("fused", fused(dist.get_rank()), BATCH, dims=dims)
    strided = any("split" in str(layout) for layout in module.plan.placements.values())
    return _error(module, fused(0)), strided


@prepared_by(captured_case)
def stages_apart(name: str, plan: bytes) -> float:
    """The same where every rank keeps the parameters of its stage only."""
    case = CASES[name]
    model = case.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(dist.get_rank()))
    module = compile_once(name, model, case.batch(0), plan=Plan.from_json(plan))
    weights = gathered(module, gradients=False)
    plain = dict(case.model().named_parameters())
    return max(float((weights[n] - plain[n].detach()).abs().max()) for n in plain if n in weights)


@prepared_by(captured_tied)
def checked(seeds: list[int]) -> str:
    """What sync="check" says, "" where nothing."""
    try:
        compile_once("tied model", tied_model(seed=seeds[dist.get_rank()]), tokens(0), sync="check")
    except autopar.RankMismatchError as error:
        return str(error)
    return ""
