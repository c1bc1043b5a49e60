"""Attention equals torch's, forward and backward, and does not depend on how the scores are cut."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.ops import attention, attention_by_index
from autopar.ops.attention_formulas import ScoreOptions
from autopar.ops.attention_math import attend, attend_backward
from autopar.ops.random_index import full_runs, keep_mask, reference_seed

MASKS = ("none", "causal", "bool", "float")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def operands(dtype: torch.dtype, groups: int, size: int = 8, value_size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 7, size), (2, groups, 9, size), (2, groups, 9, value_size))
    return tuple(torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes)


def mask_of(kind: str, dtype: torch.dtype) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    if kind == "bool":
        mask = torch.rand(2, 1, 7, 9, generator=generator) > 0.3
        mask[..., 0] = True
        return mask
    return torch.randn(7, 9, generator=generator, dtype=dtype) if kind == "float" else None


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kind", MASKS)
def test_equals_torch(dtype: torch.dtype, groups: int, kind: str) -> None:
    query, key, value = operands(dtype, groups)
    mask = mask_of(kind, dtype)
    expected = functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=kind == "causal", enable_gqa=groups != 4
    )
    out, _ = attention(query, key, value, mask, 0.0, kind == "causal", None, 0)
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (query, key, value), grad)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    for actual, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["none", "causal", "float"])
def test_formulas_equal_the_flash_kernel(kind: str) -> None:
    query, key, value = (x.detach() for x in operands(torch.float64, 2))
    options = ScoreOptions(mask=mask_of(kind, torch.float64), is_causal=kind == "causal", scale=0.3)
    kept = torch.ones(2, 4, 7, 9).bool()
    kept_all = ScoreOptions(mask=options.mask, is_causal=options.is_causal, scale=0.3, kept=kept)
    flash, formulas = attend(query, key, value, options), attend(query, key, value, kept_all)
    torch.testing.assert_close(flash, formulas)
    grad = torch.randn_like(flash[0])
    torch.testing.assert_close(
        attend_backward(grad, query, key, value, *flash, options),
        attend_backward(grad, query, key, value, *formulas, kept_all),
    )


def test_dropout_equals_autograd_of_the_formula() -> None:
    query, key, value = operands(torch.float64, 2, value_size=5)
    out, _ = attention(query, key, value, None, 0.3, True, None, 3)
    kept = keep_mask((2, 4, 7, 9), 0.3, reference_seed(query.device), 3, full_runs((2, 4, 7, 9)))
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(~torch.ones(7, 9).bool().tril(), -torch.inf)
    expected = (scores.softmax(-1) * kept / 0.7) @ value.repeat_interleave(2, 1)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, (query, key, value), grad), torch.autograd.grad(expected, (query, key, value), grad)
    )


def test_row_that_sees_nothing_gives_zeros_and_finite_gradients() -> None:
    query, key, value = operands(torch.float64, 4)
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[2] = False
    out, _ = attention(query, key, value, mask, 0.0, False, None, 0)
    out.sum().backward()
    assert not out[:, :, 2].any()
    assert all(x.grad.isfinite().all() for x in (query, key, value))


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_cut_scores_equal_the_whole(dropout_p: float) -> None:
    """Batch, heads and rows cut in two: causal flag and dropout follow the global index."""
    query, key, value = (x.detach() for x in operands(torch.float64, 4))
    whole, logsumexp = attention(query, key, value, None, dropout_p, True, None, 2)
    seed, shape = reference_seed(query.device), (2, 4, 7, 9)
    runs = (((1, 1),), ((2, 2),), ((0, 2), (5, 2)), ((0, 9),))
    rows = [0, 1, 5, 6]
    part, part_logsumexp = attention_by_index(
        query[1:, 2:, rows], key[1:, 2:], value[1:, 2:], None, dropout_p, True, None, 2, seed, runs, shape
    )
    torch.testing.assert_close(part, whole[1:, 2:, rows])
    torch.testing.assert_close(part_logsumexp, logsumexp[1:, 2:, rows])


def test_meta_tensors_give_shapes() -> None:
    query, key, value = (x.to("meta") for x in operands(torch.bfloat16, 2, value_size=6))
    out, logsumexp = attention(query, key, value, None, 0.0, True, None, 0)
    assert out.shape == (2, 4, 7, 6)
    assert (logsumexp.shape, logsumexp.dtype) == ((2, 4, 7), torch.float32)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_operator_is_well_formed(dropout_p: float) -> None:
    torch.library.opcheck(attention, (*operands(torch.float32, 2), None, dropout_p, False, None, 0))


@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (1, 4, 7, 9), (4, 1, 9), (7, 9)], ids=str)
def test_gradient_of_the_mask_equals_autograd_of_the_formula(shape: tuple[int, ...]) -> None:
    query, key, value = operands(torch.float64, 2)
    mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out, _ = attention(query, key, value, mask, 0.3, False, None, 3)
    kept = keep_mask((2, 4, 7, 9), 0.3, reference_seed(query.device), 3, full_runs((2, 4, 7, 9)))
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5 + mask
    expected = (scores.softmax(-1) * kept / 0.7) @ value.repeat_interleave(2, 1)
    grad = torch.randn_like(expected)
    inputs = (query, key, value, mask)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad))


@pytest.mark.parametrize("is_causal", [False, True])
def test_batch_dims_are_independent(is_causal: bool) -> None:
    query, key, value = (torch.randn(2, 3, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    out, logsumexp = attention(query, key, value, None, 0.0, is_causal, None, 0)
    flat, flat_logsumexp = attention(*(x.flatten(0, 1) for x in (query, key, value)), None, 0.0, is_causal, None, 0)
    torch.testing.assert_close(out, flat.unflatten(0, (2, 3)))
    torch.testing.assert_close(logsumexp, flat_logsumexp.unflatten(0, (2, 3)))
