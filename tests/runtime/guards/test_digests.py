"""What tells values of ranks apart; `tests/distributed/test_initial_weights.py` and `test_calls.py` exchange them."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.guards.digests import digest_of_text, digests_of, has_digest

WIDTH = 2048
"""Columns of fp32 that are one row of what is summed: rows that change places must show all the same."""


def digest(tensor: torch.Tensor) -> int:
    assert has_digest(tensor)
    return digests_of([torch.zeros(3), tensor])[1]


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


def test_subclasses_and_tensors_without_values_have_none() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert has_digest(parameter)
    assert not has_digest(parameter.to("meta"))
    assert not has_digest(torch.eye(2).to_sparse())


def test_equal_texts_have_one_digest_in_every_process() -> None:
    assert digest_of_text("train call 1") == -8216627318432744982
    assert digest_of_text("train call 2") != digest_of_text("train call 1")
