"""Jobs of the workers: models whose blocks are stages, beside the plain model on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor
from tests.distributed.micro_jobs import MODELS, unevenly_labelled


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


def largest_error(mine: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
    """max |dg| / |g|, tiny tensors against the largest norm; the same ones must exist."""
    assert mine.keys() == plain.keys(), mine.keys() ^ plain.keys()
    norms = {name: float(value.norm()) for name, value in plain.items()}
    largest = max(norms.values())
    return max(
        float((mine[n] - plain[n]).norm()) / (norm if norm > 1e-6 * largest else largest) for n, norm in norms.items()
    )


def plain_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def train(name: str, plan: bytes, build: Callable[[], nn.Module] | None = None) -> dict[str, float]:
    """Errors of loss, logits and gradients: of one call, and of two accumulated ones, scaled and clipped."""
    torch.manual_seed(0)
    model = MODELS[name]()
    reference = copy.deepcopy(model)
    module = autopar.compile(model, unevenly_labelled(0), plan=Plan.from_json(plan))
    output, plain = module(**unevenly_labelled(0)), reference(**unevenly_labelled(0))
    errors = {
        "loss": abs(float(output["loss"].detach()) - float(plain["loss"].detach())),
        "logits": float((module.gather(output["logits"]) - plain["logits"]).abs().max()),
    }
    output["loss"].backward()
    plain["loss"].backward()
    errors["gradients"] = largest_error(gathered(module), plain_gradients(reference))
    return errors
