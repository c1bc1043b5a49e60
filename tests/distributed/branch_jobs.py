"""Jobs of the workers whose models decide by values, along the branches of an example."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import autopar
from tests.capture.branching_models import examples
from tests.distributed.training_jobs import largest_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched:
    """errors: of the loss and of the largest gradient, at the sizes of the example and at others, captured later;
    refused: what a call on another branch says; after: the loss of the example again, less the first."""

    errors: tuple[float, ...]
    refused: str
    after: float
    splits: bool


def branches(name: str, **options: Any) -> Branched:
    """A model of `branching_models`, whose ranks begin with other random numbers."""
    model, inputs, other = examples()[name]
    reference = copy.deepcopy(model)
    torch.manual_seed(dist.get_rank())
    module = autopar.compile(model, inputs, branches="example", **options)
    errors = []
    for given in (inputs, _larger(inputs)):
        module.zero_grad(), reference.zero_grad()
        loss, expected = module(**given), reference(**given)
        loss.backward(), expected.backward()
        errors += [abs(float(loss.detach() - expected.detach())), largest_error(module, reference)]
    first = module(**inputs)
    try:
        module(**other)
        refused = ""
    except autopar.BranchError as error:
        refused = str(error)
    splits = any(axes != (None,) * len(axes) for axes in (entry.axes for entry in module.plan.operators.values()))
    return Branched(errors=tuple(errors), refused=refused, after=float(module(**inputs) - first), splits=splits)


def _larger(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Twice the samples."""
    return {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()}
