"""A job of the workers: every optimizer of torch on the parameters of a compiled module, beside the plain model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor
from autopar.runtime.weights import replaced_parameters
from tests.distributed.captured_once import compile_once, prepared_by
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
