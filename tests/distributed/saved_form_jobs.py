"""Jobs of the workers whose saved values are packed or rounded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor
from tests.distributed.captured_once import compile_once

WIDTH = 512


class Blocks(nn.Module):
    """forward(x (B, 512)): ReLU for its sign alone and for a product, flags of dropout, and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            activation = nn.functional.gelu if number else torch.relu
            x = x + nn.functional.dropout(down(activation(up(x))), 0.2)
            x = x + torch.relu(up(x))
        return x.square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Bytes that forward saved before and in the form; |dg| / |g| of the parameter that is off most, against what is
    saved as it is; the gradients."""

    saved_whole: int
    saved_packed: int
    off: float
    gradients: Mapping[str, torch.Tensor]


def saved_as(plan: Plan, form: str) -> Plan:
    """The plan with all that is saved in a form."""
    operators = {
        name: one if name.endswith("/bwd") or one.recompute else replace(one, saved_as=form)
        for name, one in plan.operators.items()
    }
    return replace(plan, operators=operators)


def parity(form: str, arguments: Mapping[str, Any]) -> Packed:
    """One step of a model, planned and then saved in a form."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(16, WIDTH)
    gradients, sizes = list[dict[str, torch.Tensor]](), list[int]()
    plain = compile_once("blocks with forms", copy.deepcopy(model), (x,), **arguments)
    for plan in (plain.plan, saved_as(plain.plan, form)):
        torch.manual_seed(3)
        module = compile_once("blocks with forms", copy.deepcopy(model), (x,), plan=plan)
        with _Saved() as saved:
            loss = module(x)
        sizes.append(saved.nbytes)
        loss.backward()
        gradients.append({name: full_tensor(p.grad) for name, p in module.named_parameters() if p.grad is not None})
    whole, packed = gradients
    off = max(float((packed[name] - whole[name]).norm() / whole[name].norm()) for name in whole)
    return Packed(saved_whole=sizes[0], saved_packed=sizes[1], off=off, gradients=packed)


class _Saved:
    """Bytes that forward hands to backward while it is active, parameters and inputs among them."""

    def __enter__(self) -> _Saved:
        self.nbytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.nbytes += tensor.nbytes
        return tensor

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
