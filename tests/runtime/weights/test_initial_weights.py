"""What tells weights of ranks apart; `tests/distributed/test_initial_weights.py` exchanges them."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.weights.initial_weights import digest

WIDTH = 2048
"""Columns of fp32 that are one row of what is summed: rows that change places must show all the same."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_equal_bits_have_one_digest_wherever_they_lie(dtype: torch.dtype) -> None:
    whole = (torch.randn(9, 700) * 9).to(dtype)
    for part in (whole, whole[1:], whole[:, 3:], whole.t(), whole[0, 0], whole[:0]):
        assert digest(part) == digest(part.clone()) == digest(part.contiguous())


def test_one_bit_shows() -> None:
    tensor = torch.randn(5, WIDTH + 3)
    for place in ((0, 0), (4, WIDTH + 2), (2, 77)):
        other = tensor.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(9.0))
        assert digest(other) != digest(tensor)


@pytest.mark.parametrize("dim", [0, 1])
def test_values_that_change_places_show(dim: int) -> None:
    tensor = torch.randn(6, WIDTH)
    assert digest(tensor.flip(dim)) != digest(tensor)
    assert digest(tensor.roll(1, dim)) != digest(tensor)
