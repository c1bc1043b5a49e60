"""Jobs of the workers about hooks on gradients and Python state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor
from autopar.runtime.weights import shard_model
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.models import tied_model, tokens
from tests.distributed.pipeline_jobs import captured as captured_case
from tests.distributed.pipeline_models import CASES
from tests.distributed.training_jobs import largest_error


def captured_in_parts(micro_batches: int = 1, **_: Any) -> bool:
    """Capture the tied model in micro-batches."""
    return capture_once("tied model", tied_model(), tokens(0), parts=micro_batches)


def _hook(model: nn.Module, calls: list[bool]) -> list[Any]:
    """Doubled gradients, and a hook behind their accumulation, on the first and the last parameter."""

    def double(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(isinstance(gradient, DTensor))
        return gradient * 2

    def add_one(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(1.0)

    handles = []
    parameters = list(model.parameters())
    for parameter in (parameters[0], parameters[-1]):
        handles.append(parameter.register_hook(double))
        handles.append(parameter.register_post_accumulate_grad_hook(add_one))
    return handles


@prepared_by(captured_in_parts)
def hooked(dims: dict[str, int], micro_batches: int, planted: bool = False) -> dict[str, Any]:
    """Gradient errors of a step with hooks from before compile, and of one behind their removal; which gradients the
    hooks got. planted: the mutation that leaves them behind."""
    model = tied_model()
    reference = copy.deepcopy(model)
    calls: list[bool] = []
    handles = _hook(model, calls) + _hook(reference, [])
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(shard_model, "share_gradient_hooks", lambda *_: 0)
        module = compile_once("tied model", model, tokens(0), dims=dims, micro_batches=micro_batches)
    errors = []
    for step in range(2):
        for each in (module, reference):
            each.zero_grad()
            each(**tokens(step))["loss"].backward()
        errors.append(largest_error(module, reference))
        for handle in handles:
            handle.remove()
    return {"errors": errors, "calls": calls}


@prepared_by(captured_case)
def hooked_stages(name: str, plan: bytes) -> dict[str, Any]:
    """Largest error of the gradients on this rank, with hooks on every parameter; how often they ran per parameter."""
    case = CASES[name]
    model, reference = case.model(), case.model()
    ran: list[str] = []

    def double(gradient: torch.Tensor, name: str = "") -> torch.Tensor:
        ran.append(name)
        return gradient * 2

    for key, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, key=key: double(gradient, key))
    module = compile_once(name, model, case.batch(0), plan=Plan.from_json(plan))
    batch = case.batch(0)
    for each in (module, reference):
        output = each(**batch) if isinstance(batch, dict) else each(*batch)
        (output if isinstance(output, torch.Tensor) else output["loss"]).backward()
    plain = {key: parameter.grad for key, parameter in reference.named_parameters()}
    errors = [
        float((full_tensor(parameter.grad) - 2 * plain[key]).norm() / plain[key].norm().clamp(min=1e-3))
        for key, parameter in module.named_parameters()
        if parameter.grad is not None
    ]
    return {"error": max(errors), "most": max(ran.count(key) for key in ran), "held": len(errors), "ran": len(ran)}


def other_activation(dims: dict[str, int]) -> list[float]:
    """Gradient errors before and behind a change of an attribute on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    reference, x = copy.deepcopy(model), torch.linspace(-1.0, 1.0, 64).view(8, 8)
    module = autopar.compile(model, x, loss_fn=lambda output, batch: output.pow(2).mean(), dims=dims, mode="fast")
    errors = []
    for approximate in ("none", "tanh"):
        for each in (module, reference):
            each.get_submodule("1").approximate = approximate
            each.zero_grad()
        module(x).backward()
        reference(x).pow(2).mean().backward()
        errors.append(largest_error(module, reference))
    return errors
