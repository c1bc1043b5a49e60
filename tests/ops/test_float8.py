"""Products in float8 equal an exact emulation: operands rounded to e4m3, products and sums in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ops.float8 import mm_fp8_rowwise, mm_fp8_tensorwise, quantised_rows_reference

SUMS = 2e-6
"""Relative error of fp32 sums over some hundred elements."""


def emulated(a: Tensor, b: Tensor, *, rows: bool) -> Tensor:
    """The product in fp64 of operands rounded as float8 rounds, bit by bit from its definition."""

    def rounded(x: Tensor) -> Tensor:
        largest = x.abs().amax(dim=1, keepdim=True) if rows else x.abs().amax()
        scale = (largest.float() / 448).clamp_min(torch.finfo(torch.float32).tiny)
        value = (x.float() / scale).double()
        exponent = torch.frexp(value.abs().clamp_min(2.0**-6))[1] - 1  # e4m3: subnormal below 2^-6
        step = 2.0 ** (exponent - 3).double()
        return (value / step).round() * step * scale.double()

    return rounded(a) @ rounded(b.t()).t()


@pytest.mark.parametrize(("m", "k", "n"), [(32, 64, 48), (5, 20, 7), (1, 16, 16), (33, 250, 31)])
@pytest.mark.parametrize("rows", [True, False])
def test_a_product_equals_the_emulation(m: int, k: int, n: int, rows: bool) -> None:
    torch.manual_seed(m)
    a, b = torch.randn(m, k), torch.randn(k, n) * 10.0 ** torch.randint(-3, 3, (1, n))
    found = (mm_fp8_rowwise if rows else mm_fp8_tensorwise)(a, b)
    expected = emulated(a, b, rows=rows)
    assert found.shape == (m, n)
    assert found.dtype == a.dtype
    assert float((found.double() - expected).norm() / expected.norm()) < SUMS
    away = (found.double() - a.double() @ b.double()).norm() / (a.double().abs() @ b.double().abs()).norm()
    assert 1e-3 < float(away) < 0.06, "rounded, and not more than e4m3 does"


def test_a_scale_per_row_keeps_the_digits_of_small_rows() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    a[0] *= 1e4  # beside this row the others are subnormal in float8
    exact = (a.double() @ b.double())[1:]
    found = [product(a, b).double()[1:] for product in (mm_fp8_rowwise, mm_fp8_tensorwise)]
    errors = [float((values - exact).norm() / exact.norm()) for values in found]
    assert errors[0] < 0.05 < errors[1]


def test_rows_of_zeros_and_empty_operands() -> None:
    rounded, scale = quantised_rows_reference(torch.zeros(2, 16))
    assert rounded.float().abs().max() == 0
    assert (scale > 0).all()
    assert torch.equal(mm_fp8_rowwise(torch.zeros(3, 16), torch.ones(16, 16)), torch.zeros(3, 16))
    assert mm_fp8_rowwise(torch.ones(0, 16), torch.ones(16, 4)).shape == (0, 4)
    assert torch.equal(mm_fp8_tensorwise(torch.ones(2, 0), torch.ones(0, 4)), torch.zeros(2, 4))


def test_what_is_not_finite_is_not_lost() -> None:
    a = torch.ones(2, 16)
    a[0, 3] = float("inf")
    found = mm_fp8_rowwise(a, torch.ones(16, 16))
    assert not torch.isfinite(found[0]).any()
    assert torch.isfinite(found[1]).all()
