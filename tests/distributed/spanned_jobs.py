"""Jobs of the workers whose stages make runs of blocks again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import local_tensor
from tests.distributed.captured_once import compile_once
from tests.distributed.pipeline_jobs import largest_error
from tests.planner.pipelines.chains import batch, chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Spanned:
    """Errors against the plain model, and what has other bits than under the plan that saves everything."""

    loss: float
    gradients: float
    different: list[str]


def saving(plan: Plan) -> Plan:
    """The plan that computes nothing twice, and keeps everything on the device."""
    operators = {
        name: replace(operator, recompute=False, recompute_at=(), saved_on="device")
        for name, operator in plan.operators.items()
    }
    parameters = {name: replace(parameter, stored_on="device") for name, parameter in plan.parameters.items()}
    return replace(plan, operators=operators, parameters=parameters)


def chain_under(plan: bytes) -> Spanned:
    """One call of the chain."""
    given = Plan.from_json(plan)
    reference, losses = chain(), list[torch.Tensor]()
    modules = [compile_once("chain", chain(), batch(), plan=one) for one in (given, saving(given))]
    for module in (*modules, reference):
        losses.append(module(batch()))
        losses[-1].backward()
    return Spanned(
        loss=abs(float(losses[0].detach()) - float(losses[2].detach())),
        gradients=largest_error(modules[0], reference),
        different=["loss"] * (not torch.equal(losses[0], losses[1])) + list(_differences(*modules)),
    )


def _differences(module: nn.Module, other: nn.Module) -> Iterator[str]:
    for (name, mine), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        if mine.grad is None or theirs.grad is None:
            if mine.grad is not theirs.grad:
                yield name
        elif not torch.equal(local_tensor(mine.grad), local_tensor(theirs.grad)):
            yield name
