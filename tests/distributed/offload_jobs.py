"""Jobs of the workers whose parameters and saved values wait in the memory of the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.ops.host_copies import PlainCopies, copies_by
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import HOST
from autopar.runtime.parameters import local_tensor
from benchmarks.agreement import loss_of
from benchmarks.zoo.registry import zoo_model
from tests.distributed.captured_once import compile_once, prepared_by
from tests.distributed.parity_jobs import captured_zoo


class Counted(PlainCopies):
    """Counts bytes; a scale of 1 spoils nothing."""

    def __init__(self, scale: float) -> None:
        self.scale, self.sent, self.brought = scale, 0, 0

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        self.sent += source.nbytes
        return super().to_host(source * self.scale if source.is_floating_point() else source)

    def from_host(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.brought += source.nbytes
        return super().from_host(source, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """What a rank copied, and whether it has other gradients, or other weights after three steps, than without."""

    sent: int
    brought: int
    different: list[str]


def on_host(plan: Plan, ahead: float = 0.0) -> Plan:
    """The plan with all parameters, and all that is saved, on the host."""
    operators = {
        name: operator if name.endswith("/bwd") or operator.recompute else replace(operator, saved_on=HOST)
        for name, operator in plan.operators.items()
    }
    parameters = {name: replace(parameter, stored_on=HOST) for name, parameter in plan.parameters.items()}
    return replace(plan, operators=operators, parameters=parameters, copy_ahead_bytes=ahead)


@prepared_by(captured_zoo)
def parity(
    name: str, cases: Mapping[str, Mapping[str, Any]], ahead: float = 0.0, scale: float = 1.0
) -> dict[str, Offloaded]:
    """All cases (name -> arguments of compile) of one model of the zoo, planned and then put on the host."""
    model, inputs = zoo_model(name)
    found = {}
    for case, arguments in cases.items():
        plain = compile_once(f"zoo {name}", copy.deepcopy(model), inputs, **arguments)
        copies = Counted(scale)
        with copies_by("cpu", copies):
            moved = compile_once(f"zoo {name}", copy.deepcopy(model), inputs, plan=on_host(plain.plan, ahead))
            different = list(_differences(plain, moved, inputs))
        found[case] = Offloaded(sent=copies.sent, brought=copies.brought, different=different)
    return found


def _differences(plain: nn.Module, moved: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What is not equal, bit for bit, in three steps of AdamW."""
    for module in (plain, moved):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(module(**inputs)).backward()
            optimizer.step()
    for (name, mine), theirs in zip(moved.named_parameters(), plain.parameters(), strict=True):
        for kind, a, b in (("weight", mine, theirs), ("gradient", mine.grad, theirs.grad)):
            assert a is not None
            assert b is not None
            if not torch.equal(local_tensor(a), local_tensor(b)):
                yield f"{kind} of {name}"
