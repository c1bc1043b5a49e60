"""Jobs of the workers: models whose blocks are stages, beside the plain model on the whole batch."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor
from autopar.runtime.pipeline import overflow as overflow_module
from autopar.runtime.pipeline import parts_step
from autopar.runtime.pipeline.pipeline_run import PipelineRun
from autopar.runtime.pipeline.stage_passes import StageGraphs
from autopar.schedules.actions import PipeAction
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
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


def captured(name: str, plan: bytes | None = None, plans: Sequence[bytes] = (), steps: int = 1, **_: Any) -> bool:
    """Capture a case in the micro-batches of its plans."""
    case, given = CASES[name], [Plan.from_json(one) for one in (*plans, *([plan] if plan else []))]
    wanted = {(one.micro_batches, one.question.get("precision")) for one in given}
    made = [
        capture_once(name, case.model(), case.batch(0), parts=parts, evaluates=steps > 1, precision=how)
        for parts, how in wanted
    ]
    return any(made)


@prepared_by(captured)
def train(name: str, plans: list[bytes], steps: int = 1) -> list[dict[str, float]]:
    """Per plan, the errors of loss, logits and gradients of one call, and of what else training does."""
    return [_trained(name, plan, steps) for plan in plans]


def _trained(name: str, plan: bytes, steps: int) -> dict[str, float]:
    case = CASES[name]
    reference = case.model()
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan))
    output, plain = module(**case.batch(0)), reference(**case.batch(0))
    errors = {
        "loss": abs(float(output["loss"].detach()) - float(plain["loss"].detach())),
        "logits": float((module.full(output["logits"]) - plain["logits"]).detach().abs().max()),
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


@prepared_by(captured)
def train_with_fault(name: str, plan: bytes, fault: str) -> dict[str, float]:
    """As `train` with one plan, with a fault in the executor: it must show."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "missing weight gradient":
            patch.setattr(StageGraphs, "run_weights", lambda *_: None)
        else:
            receive = PipelineRun._receive
            patch.setattr(PipelineRun, "_receive", lambda self, action: receive(self, _swapped(action)))
        return _trained(name, plan, 1)


@prepared_by(captured)
def train_delayed(name: str, plans: list[bytes]) -> list[dict[str, float]]:
    """As `train`, where every rank sleeps in front of passes as it draws."""
    draw, act = random.Random(dist.get_rank()), PipelineRun.act

    def late(self: PipelineRun, action: PipeAction, received: dict[str, torch.Tensor]) -> None:
        time.sleep(draw.choice((0.0, 0.0, 0.02)))
        act(self, action, received)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineRun, "act", late)
        return [_trained(name, plan, 1) for plan in plans]


@prepared_by(captured)
def train_half_summed(name: str, plan: bytes) -> dict[str, float]:
    """As `train` with one plan, with half of one of the sums that are awaited behind the passes."""
    end = StageGraphs.run_ending

    def half(self: StageGraphs, started: list[Any]) -> dict[str, torch.Tensor]:
        found = end(self, started)
        return {n: g / 2 if index == 0 and self.ending is not None else g for index, (n, g) in enumerate(found.items())}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageGraphs, "run_ending", half)
        return _trained(name, plan, 1)


@prepared_by(captured)
def saved_and_loaded(name: str, plan: bytes, folder: str) -> float:
    """Largest difference of the weights of a plain module on one device from those that two stages saved."""
    case = CASES[name]
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module(**case.batch(0))["loss"].backward()
    optimizer.step()
    autopar.save(f"{folder}/step", module, optimizer)
    trained = gathered(module, gradients=False)
    module(**case.batch(1))["loss"].backward()
    optimizer.step()
    autopar.load(f"{folder}/step", module, optimizer)
    again = gathered(module, gradients=False)
    other = compile_once(name, case.model(), case.batch(0), dims={"tp": 2})
    autopar.load(f"{folder}/step", other)
    whole = gathered(other, gradients=False)
    return max(float((found[n] - trained[n]).abs().max()) for found in (again, whole) for n in trained)


@prepared_by(captured)
def refused(name: str, plan: bytes) -> str:
    """What the error of a batch that does not split says."""
    case = CASES[name]
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan))
    with pytest.raises(autopar.AutoparError) as caught:
        module(**_first(case.batch(0), 3))
    return str(caught.value)


@prepared_by(captured)
def end_in_a_step(name: str, plan: bytes) -> None:
    """The last rank ends in the middle of its third pass."""
    case = CASES[name]
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan))
    act, passes = PipelineRun.act, list[PipeAction]()

    def ending(self: PipelineRun, action: PipeAction, received: dict[str, torch.Tensor]) -> None:
        passes.append(action)
        if dist.get_rank() == dist.get_world_size() - 1 and len(passes) == 3:
            os._exit(1)
        act(self, action, received)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineRun, "act", ending)
        module(**case.batch(0))


@prepared_by(captured)
def verified(name: str, plan: bytes) -> tuple[int, str]:
    """How many gradients `verify` compares, and what it says of a module without gradients of weights in W."""
    case = CASES[name]
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan))
    found = autopar.verify(module, case.batch(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageGraphs, "run_weights", lambda *_: None)
        with pytest.raises(autopar.VerificationError) as caught:
            autopar.verify(module, case.batch(1))
    return len(found.gradients), str(caught.value)


@prepared_by(captured)
def train_on_own_parts(name: str, plan: bytes, forget: bool = False) -> float:
    """Error of the gradients where every rank passes its part of the batch; forget: the same part everywhere."""
    case = CASES[name]
    reference = case.model()
    reference(**case.batch(0))["loss"].backward()
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan), batch="local")
    index, count = module.data_shard()
    part = {n: tensor.chunk(count)[0 if forget else index] for n, tensor in case.batch(0).items()}
    module(**part)["loss"].backward()
    return largest_error(module, reference)


@prepared_by(captured)
def scaled_steps(name: str, plan: bytes, apart: bool = False, told: bool = True) -> list[tuple[float, bool, float]]:
    """Per step, of which the first overflows on the last rank: (scale afterwards, whether the weights moved, error of
    the gradients). apart: no rank tells others, nor compares what they did. told: of the scaler, when compiling."""
    case = CASES[name]
    reference = case.model()
    reference(**case.batch(0))["loss"].backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    checks = 0 if apart else 50
    given = {"scaler": scaler} if told else {}
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan), check_calls=checks, **given)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    together, found = parts_step.overflow_together, list[tuple[float, bool, float]]()

    def overflow(gradients: dict[str, torch.Tensor], device: torch.device) -> None:
        if not found and dist.get_rank() == dist.get_world_size() - 1:
            next(iter(gradients.values())).view(-1)[0] = float("inf")
        if not apart:
            together(gradients, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_step if told else overflow_module, "overflow_together", overflow)
        for _ in range(2):
            before = [full_tensor(p.detach()).clone() for p in module.parameters()]
            optimizer.zero_grad()
            scaler.scale(module(**case.batch(0))["loss"]).backward()
            scaler.unscale_(optimizer)
            error = largest_error(module, reference) if found and not apart else 0.0
            scaler.step(optimizer)
            scaler.update()
            now = [full_tensor(p.detach()) for p in module.parameters()]
            moved = any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
            found.append((scaler.get_scale(), moved, error))
    return found


@prepared_by(captured)
def delayed_steps(name: str, plan: bytes, late: bool = True) -> float:
    """Error of the weights after steps of SGD with the gradients of the batch before, at the weights of that batch.

    late: False, with those of the batch itself.
    """
    case = CASES[name]
    reference = case.model()
    module = compile_once(name, case.model(), case.batch(0), plan=Plan.from_json(plan))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (module, reference)]
    before: list[torch.Tensor] = [torch.zeros_like(p) for p in reference.parameters()]
    for step in range(4):
        for used, optimizer in zip((module, reference), optimizers, strict=True):
            optimizer.zero_grad()
            used(**case.batch(step))["loss"].backward()
        fresh = [p.grad.clone() for p in reference.parameters() if p.grad is not None]
        for parameter, gradient in zip(reference.parameters(), before if late else fresh, strict=True):
            parameter.grad = gradient
        before = fresh
        for optimizer in optimizers:
            optimizer.step()
    return largest_error(module, reference, gradients=False)


def _first(batch: dict[str, torch.Tensor], samples: int) -> dict[str, torch.Tensor]:
    return {name: tensor[:samples] for name, tensor in batch.items()}


def _swapped(action: PipeAction) -> PipeAction:
    """The first two micro-batches of what the second stage receives in forward change places."""
    if action.stage == 1 and action.kind == "F" and action.micro_batch < 2:
        return action._replace(micro_batch=1 - action.micro_batch)
    return action
