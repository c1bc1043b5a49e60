"""Rotary embeddings are those of Hugging Face's Llama, and their gradients those of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ops.rope import rope, rope_backward

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def rotate_half(x: Tensor) -> Tensor:
    """As transformers' modeling_llama.py has it."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_interleaved(x: Tensor) -> Tensor:
    """As transformers' modeling_cohere.py has it."""
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def operands(dtype: torch.dtype, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x as projections leave it, by sequence; every element with an angle of its own."""
    torch.manual_seed(5)
    x = torch.randn(2, 7, 3, 10, dtype=torch.float64).to(dtype).transpose(1, 2)
    cos, sin = (torch.randn(batch, 7, 10, dtype=torch.float64).to(dtype) for _ in range(2))
    return x, cos, sin


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients_are_those_of_the_formula(dtype: torch.dtype, interleaved: bool, batch: int) -> None:
    x, cos, sin = operands(dtype, batch)
    wide = x.double().requires_grad_()
    turn = rotate_interleaved if interleaved else rotate_half
    expected = wide * cos.double().unsqueeze(1) + turn(wide) * sin.double().unsqueeze(1)
    grad = torch.randn_like(x)
    (expected_grad,) = torch.autograd.grad(expected, wide, grad.double())
    found, found_grad = rope(x, cos, sin, interleaved), rope_backward(grad, cos, sin, interleaved)
    for one, other in ((found, expected), (found_grad, expected_grad)):
        assert one.dtype == dtype
        assert one.stride() == x.stride()
        assert float((one.double() - other).norm() / other.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_turns_back_where_pairs_have_one_angle(interleaved: bool) -> None:
    x, _, _ = operands(torch.float64)
    angles = torch.arange(35.0, dtype=torch.float64).reshape(1, 7, 5)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    cos, sin = angles.cos(), angles.sin()
    back = rope_backward(x, cos, sin, interleaved)
    torch.testing.assert_close(back, rope(x, cos, -sin, interleaved))
    torch.testing.assert_close(rope(back, cos, sin, interleaved), x)


@pytest.mark.parametrize("operator", [rope, rope_backward])
def test_fake_tensors_are_those_of_the_operators(operator: torch.library.CustomOpDef) -> None:
    x, cos, sin = operands(torch.bfloat16)
    for given in (x, x.contiguous(), x[..., ::2].repeat(1, 1, 1, 2)[..., :4], x[:, 1:]):
        arguments = (given, cos[..., : given.shape[-1]], sin[..., : given.shape[-1]], False)
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
