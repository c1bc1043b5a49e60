"""A job of the workers: every optimizer of torch on the parameters of a compiled module, beside the plain model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor, local_tensor
from autopar.runtime.weights import optimizer_draws, replaced_parameters
from autopar.runtime.weights.clip_grad import holders
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.models import captured_tied, tied_model, tokens
from tests.distributed.pipeline_jobs import captured as captured_case
from tests.distributed.pipeline_models import CASES

STEPS = 3
OPTIONS: dict[str, dict[str, Any]] = {"LBFGS": {"lr": 0.1, "max_iter": 4}, "SGD": {"lr": 0.1, "momentum": 0.9}}


def classes() -> list[str]:
    """The names of torch's optimizers."""
    found = [each for each in vars(torch.optim).values() if inspect.isclass(each)]
    return sorted(each.__name__ for each in found if issubclass(each, Optimizer) and each is not Optimizer)


@prepared_by(captured_tied)
def after_steps(dims: dict[str, int], names: list[str], planted: bool = False) -> dict[str, Any]:
    """By optimizer: the largest difference of a weight after some steps, over the largest change; or the error.
    planted: without the guard."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(replaced_parameters, "refuse_unfit", lambda *_: None)
        module = compile_once("tied model", tied_model(), tokens(0), dims=dims, mode="fast")
        initial = {name: value.detach().clone() for name, value in module.named_parameters()}
        for name in names:
            for parameter, value in zip(module.parameters(), initial.values(), strict=True):
                parameter.detach().copy_(value)
            module.zero_grad()
            try:
                found[name] = _difference(module, getattr(torch.optim, name), OPTIONS.get(name, {}))
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


@prepared_by(captured_case)
def in_stages(name: str, plan: bytes) -> dict[str, str]:
    """What a step says where each rank holds one of two stages, "" where nothing."""
    case = CASES[name]
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan))
    found = {}
    for kind in (torch.optim.AdamW, torch.optim.LBFGS):
        try:
            kind(module.parameters(), lr=1e-3).step(*([lambda: 0.0] if kind is torch.optim.LBFGS else []))
            found[kind.__name__] = ""
        except autopar.AutoparError as error:
            found[kind.__name__] = f"{type(error).__name__}: {error}"
    return found


def _difference(module: nn.Module, kind: Any, options: dict[str, Any]) -> float:
    plain = tied_model()
    before = {name: value.detach().clone() for name, value in plain.named_parameters()}
    for model in (module, plain):
        optimizer = kind(list(_trained(model, kind)), **options)
        for step in range(STEPS):
            _step(model, optimizer, step)
    weights = dict(module.named_parameters())
    errors = [float((full_tensor(weights[n].detach()) - p.detach()).abs().max()) for n, p in plain.named_parameters()]
    moved = [float((p.detach() - before[n]).abs().max()) for n, p in plain.named_parameters()]
    return max(errors) / max(moved)


def _trained(model: nn.Module, kind: Any) -> Iterator[nn.Parameter]:
    """What an optimizer takes: Muon only matrices."""
    for parameter in model.parameters():
        if parameter.requires_grad and (kind.__name__ != "Muon" or parameter.ndim == 2):
            yield parameter


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**tokens(step))["loss"]
        loss.backward()
        return loss.detach()

    optimizer.step(closure)


class RoundedSGD(torch.optim.SGD):
    """SGD that rounds as torchao's optimizers do: up or down, by the bits that are cut off."""

    bf16_stochastic_round = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            wide = local_tensor(parameter).float() - 0.1 * local_tensor(parameter.grad).float()
            up = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32)
            bits = (wide.view(torch.int32) + up) & ~0xFFFF
            local_tensor(parameter).copy_(bits.view(torch.float32).bfloat16())


def captured_narrow(**_: Any) -> bool:
    """Capture the tied model with weights of bf16."""
    return capture_once("tied model", tied_model().bfloat16(), tokens(0))


@prepared_by(captured_narrow)
def rounded_at_random(dims: dict[str, int], planted: bool = False) -> float | str:
    """The largest difference between ranks of a weight that both hold, after some steps; or the error of a step.
    planted: each rank draws what its own generator says."""
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(optimizer_draws, "draws_at_random", lambda _: False)
        model = tied_model().bfloat16()
        module = compile_once("tied model", model, tokens(0), dims=dims, mode="fast", check_calls=0)
        optimizer = RoundedSGD([parameter for parameter in module.parameters() if parameter.requires_grad])
        torch.manual_seed(dist.get_rank())
        try:
            for step in range(STEPS):
                optimizer.zero_grad()
                module(**tokens(step))["loss"].backward()
                optimizer.step()
        except autopar.AutoparError as error:
            return f"{type(error).__name__}: {error}"
    copies = [local_tensor(each.detach()).float() for each in module.parameters() if holders(each) == 2]
    mine = torch.cat([copy.flatten() for copy in copies])
    theirs = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(theirs, mine)
    return float((theirs[0] - theirs[1]).abs().max())
