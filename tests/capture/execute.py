"""Run a captured program on real tensors, and the plain model beside it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar._compat import tree_leaves
from autopar.program import Program


def run_program(program: Program, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The returned values, with tangents of ones for what is called loss, or for all where nothing is."""
    tangents = {entry.name for entry in program.inputs if entry.role == "tangent"}
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = tree_leaves((args, kwargs))
    tensors = iter([leaves[index] for index in program.tensor_leaves])
    values = []
    for entry in program.inputs:
        if entry.role in ("parameter", "buffer"):
            values.append(state[entry.name].detach().clone())
        elif entry.role == "input":
            values.append(next(tensors))
        else:
            counts = entry.name == "loss" or "loss" not in tangents
            values.append(torch.full(entry.shape, float(counts), dtype=entry.dtype))
    return list(fx.Interpreter(program.graph_module).run(*values))


def outputs_of(program: Program, values: list[Tensor], role: str) -> dict[str, Tensor]:
    """Values of one role by name."""
    return {o.name: value for o, value in zip(program.outputs, values, strict=True) if o.role == role}


def eager_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, gradients, buffers) of one step of a copy of the model."""
    model = copy.deepcopy(model)
    output = model(*args, **kwargs)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, dict(model.named_buffers())


def worst_gradient_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest |dg| / |g| over the parameters; |g| is at least 1e-4 of the largest (key biases have gradient 0)."""
    assert actual.keys() == expected.keys()
    floor = 1e-4 * max(float(gradient.norm()) for gradient in expected.values())
    return max(float((actual[n] - g).norm()) / max(float(g.norm()), floor) for n, g in expected.items())
