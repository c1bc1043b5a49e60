"""Whatever a user has: captured graphs of unusual models compute what the plain model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar._compat import tree_leaves
from autopar.capture import capture
from autopar.program import Program
from tests.capture.execute import outputs_of, run_program
from tests.capture.intake_forward import FORWARD
from tests.capture.intake_state import STATE

ALL = {**STATE, **FORWARD}


def tensors_of(value: Any) -> list[Tensor]:
    """Tensors of an output in order; dataclasses by their fields."""
    if hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
        return [tensor for item in value for tensor in tensors_of(item)]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def assert_near(actual: Tensor, expected: Tensor, program: Program) -> None:
    """Equal but for rounding: in norm to 1e-5, to 2 % where the program computes in bf16."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "call_function"]
    tolerance = 2e-2 if any(isinstance(v, Tensor) and v.dtype == torch.bfloat16 for v in values) else 1e-5
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    difference = (actual - expected).to(torch.complex128).abs().norm()
    assert difference <= tolerance * expected.to(torch.complex128).abs().norm() + 1e-7


def eager(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, gradients by name, buffers) of one step of the plain model, tangents of ones as the program's."""
    outputs = tensors_of(model(*args, **kwargs))
    named = {o.name: i for i, o in enumerate(o for o in program.outputs if o.role in ("loss", "output"))}
    roots = [outputs[named[value.name]] for value in program.inputs if value.role == "tangent"]
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: g.to_dense() if g.is_sparse else g for name, g in gradients.items()}
    return outputs, gradients, dict(model.named_buffers())


def compare(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Assert that capture and the plain model agree on outputs, gradients and buffers."""
    buffers_before = {name: b.clone() for name, b in model.named_buffers()}
    program = capture(model, args, kwargs)
    for name, before in model.named_buffers():
        torch.testing.assert_close(before, buffers_before[name], msg=f"capture changed {name}")
    values = run_program(program, model, args, kwargs)
    outputs, gradients, buffers = eager(model, args, kwargs, program)
    actual = [v for o, v in zip(program.outputs, values, strict=True) if o.role in ("loss", "output")]
    assert len(actual) == len(outputs)
    for mine, plain in zip(actual, outputs, strict=True):
        assert_near(mine, plain.detach(), program)
    found = outputs_of(program, values, "gradient")
    assert {n for n in found if n in dict(model.named_parameters())} == gradients.keys()
    for name, gradient in gradients.items():
        assert_near(found[name], gradient, program)
    mutated = outputs_of(program, values, "mutation")
    for name, plain in buffers.items():
        torch.testing.assert_close(mutated.get(name, buffers_before[name]), plain)
    return program


@pytest.mark.exhaustive(every=7)
@pytest.mark.parametrize("name", ALL)
def test_capture_equals_the_plain_model(name: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = ALL[name]()
    compare(model.train(), args, kwargs)
