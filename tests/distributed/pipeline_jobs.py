"""Jobs of the workers: models whose blocks are stages, beside the plain model on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor
from autopar.runtime.pipeline import _Run
from autopar.runtime.stage_graphs import StageGraphs
from autopar.schedules.actions import PipeAction
from tests.distributed.pipeline_models import CASES


def gathered(module: nn.Module, gradients: bool = True) -> dict[str, torch.Tensor]:
    """Every gradient, or parameter, of all stages; what several stages hold must be equal."""
    values = {n: p.grad if gradients else p.detach() for n, p in module.named_parameters()}
    own = {name: full_tensor(value) for name, value in values.items() if value is not None}
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, own)
    found: dict[str, torch.Tensor] = {}
    for part in all_of_them:
        for name, value in part.items():
            assert torch.equal(found.setdefault(name, value), value), name
    return found


def largest_error(module: nn.Module, reference: nn.Module, gradients: bool = True) -> float:
    """max |dg| / |g|, tiny tensors against the largest norm; the same ones must exist, under their first names."""
    plain = {
        name: value
        for name, parameter in reference.named_parameters()
        if (value := parameter.grad if gradients else parameter.detach()) is not None
    }
    aliases = {
        n: first
        for first, p in reference.named_parameters()
        for n, q in reference.named_parameters(remove_duplicate=False)
        if q is p
    }
    mine = {aliases[name]: value for name, value in gathered(module, gradients).items()}
    assert mine.keys() == plain.keys(), mine.keys() ^ plain.keys()
    norms = {name: float(value.norm()) for name, value in plain.items()}
    largest = max(norms.values())
    return max(
        float((mine[n] - plain[n]).norm()) / (norm if norm > 1e-6 * largest else largest) for n, norm in norms.items()
    )


def train(name: str, plans: list[bytes], steps: int = 1) -> list[dict[str, float]]:
    """Per plan, the errors of loss, logits and gradients of one call, and of what else training does."""
    return [_trained(name, plan, steps) for plan in plans]


def _trained(name: str, plan: bytes, steps: int) -> dict[str, float]:
    case = CASES[name]
    reference = case.model()
    module = autopar.compile(case.model(), case.batch(0), plan=Plan.from_json(plan))
    output, plain = module(**case.batch(0)), reference(**case.batch(0))
    errors = {
        "loss": abs(float(output["loss"].detach()) - float(plain["loss"].detach())),
        "logits": float((module.gather(output["logits"]) - plain["logits"]).detach().abs().max()),
    }
    output["loss"].backward()
    plain["loss"].backward()
    errors["gradients"] = largest_error(module, reference)
    if steps > 1:
        errors |= _train_on(module, reference, name, steps)
    return errors


def _train_on(module: nn.Module, reference: nn.Module, name: str, steps: int) -> dict[str, float]:
    """Accumulated, scaled and clipped gradients; steps of AdamW; no_grad and eval."""
    batch = CASES[name].batch
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (module, reference)]
    errors: dict[str, float] = {}
    for step in range(steps):
        for used, optimizer in zip((module, reference), optimizers, strict=True):
            optimizer.zero_grad()
            for seed in (1, 2):
                (used(**batch(seed + step))["loss"] * 64.0).backward()
        norm = autopar.clip_grad_norm_(module.parameters(), 0.1)
        plain = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        errors[f"norm {step}"] = abs(float(norm) - float(plain)) / float(plain)
        errors[f"clipped {step}"] = largest_error(module, reference)
        for optimizer in optimizers:
            optimizer.step()
        errors[f"weights {step}"] = largest_error(module, reference, gradients=False)
    for used in (module, reference):
        used.eval()
    with torch.no_grad():
        errors["eval"] = abs(float(module(**batch(3))["loss"]) - float(reference(**batch(3))["loss"]))
        for used in (module, reference):
            used.train()
        errors["no_grad"] = abs(float(module(**batch(3))["loss"]) - float(reference(**batch(3))["loss"]))
    return errors


def train_with_fault(name: str, plan: bytes, fault: str) -> dict[str, float]:
    """As `train` with one plan, with a fault in the executor: it must show."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "missing weight gradient":
            patch.setattr(StageGraphs, "run_weights", lambda *_: None)
        else:
            receive = _Run._receive
            patch.setattr(_Run, "_receive", lambda self, action: receive(self, _swapped(action)))
        return _trained(name, plan, 1)


def saved_and_loaded(name: str, plan: bytes, folder: str) -> float:
    """Largest difference of the weights of a plain module on one device from those that two stages saved."""
    case = CASES[name]
    module = autopar.compile(case.model(), case.batch(0), plan=Plan.from_json(plan))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module(**case.batch(0))["loss"].backward()
    optimizer.step()
    autopar.save(f"{folder}/step", module, optimizer)
    trained = gathered(module, gradients=False)
    module(**case.batch(1))["loss"].backward()
    optimizer.step()
    autopar.load(f"{folder}/step", module, optimizer)
    again = gathered(module, gradients=False)
    other = autopar.compile(case.model(), case.batch(0), dims={"tp": 2})
    autopar.load(f"{folder}/step", other)
    whole = gathered(other, gradients=False)
    return max(float((found[n] - trained[n]).abs().max()) for found in (again, whole) for n in trained)


def refused(name: str, plan: bytes) -> list[str]:
    """What the errors of unsupported requests say."""
    case = CASES[name]
    module = autopar.compile(case.model(), case.batch(0), plan=Plan.from_json(plan))
    messages = []
    for request in (lambda: autopar.verify(module, case.batch(0)), lambda: module(**_first(case.batch(0), 3))):
        with pytest.raises(autopar.AutoparError) as caught:
            request()
        messages.append(str(caught.value))
    return messages


def _first(batch: dict[str, torch.Tensor], samples: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:samples] for name, tensor in batch.items()}


def _swapped(action: PipeAction) -> PipeAction:
    """The first two micro-batches of what the second stage receives in forward change places."""
    if action.stage == 1 and action.kind == "F" and action.micro_batch < 2:
        return action._replace(micro_batch=1 - action.micro_batch)
    return action
