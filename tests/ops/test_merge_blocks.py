"""Blocks of attention joined give attention over all keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops.attention_formulas import ScoreOptions
from autopar.ops.attention_math import attend
from autopar.ops.merge_blocks import merge_blocks

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def block(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, logsumexp) over these keys; rows of -inf see nothing."""
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp.masked_fill(logsumexp == -math.inf, 0).unsqueeze(-1)).exp()
    return weights @ value, logsumexp


def operands() -> tuple[Tensor, Tensor]:
    """Scores of which a row sees nothing of the first block, one nothing of the second, one nothing; values."""
    torch.manual_seed(2)
    scores, value = torch.randn(2, 3, 5, 9, dtype=torch.float64) * 5, torch.randn(2, 3, 9, 4, dtype=torch.float64)
    scores[:, :, 0, :4] = -math.inf
    scores[:, :, 1, 4:] = -math.inf
    scores[:, :, 2] = -math.inf
    return scores, value


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_two_blocks_give_the_whole(dtype: torch.dtype) -> None:
    scores, value = operands()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    (out, sums), (other, other_sums) = block(scores[..., :4], value[:, :, :4]), block(scores[..., 4:], value[:, :, 4:])
    by_sequence = out.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
    found, logsumexp = merge_blocks(by_sequence, sums.to(wide), other.to(dtype), other_sums.to(wide))
    expected, expected_sums = block(scores, value)
    assert (found.dtype, found.stride(), logsumexp.dtype) == (dtype, by_sequence.stride(), wide)
    assert float((found.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
    assert found[:, :, 2].abs().max() == 0, "a row that sees nothing"
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(logsumexp.double(), expected_sums, rtol=tolerance, atol=tolerance)


def test_many_blocks_lose_nothing_where_the_total_is_wide() -> None:
    torch.manual_seed(4)
    scores, value = torch.randn(1, 2, 6, 64, dtype=torch.float64), torch.randn(1, 2, 64, 8, dtype=torch.float64)
    expected = block(scores, value)[0]
    blocks = [block(scores[..., at : at + 1], value[:, :, at : at + 1]) for at in range(64)]
    narrow = [(out.bfloat16(), sums.float()) for out, sums in blocks]
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        out, logsumexp = narrow[0][0].to(dtype), narrow[0][1]
        for other in narrow[1:]:
            out, logsumexp = merge_blocks(out, logsumexp, *other)
        errors.append(float((out.double() - expected).norm() / expected.norm()))
    assert errors[0] < 2.0**-9 < errors[1]


class _Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name == "autopar::merge_blocks":
            self.dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("keys", "dtypes"),
    [(((0, 8),), [torch.bfloat16]), (((0, 4), (6, 2), (4, 2)), [torch.float32] * 2)],
)
def test_a_cut_causal_attention_is_joined_by_it(keys: tuple[tuple[int, int], ...], dtypes: list[torch.dtype]) -> None:
    """Two blocks in their own dtype, more in that of the logsumexp."""
    query, key = torch.randn(1, 2, 2, 8).bfloat16(), torch.randn(1, 2, 8, 8).bfloat16()
    options = ScoreOptions(is_causal=True, rows=((6, 2),), keys=keys)
    with _Called() as called:
        out, logsumexp = attend(query, key, key, options)
    assert called.dtypes == dtypes
    everything = torch.ones(1, 2, 2, 8, dtype=torch.bool)
    expected = attend(query, key, key, ScoreOptions(is_causal=True, rows=((6, 2),), keys=keys, kept=everything))
    torch.testing.assert_close(out, expected[0], rtol=2.0**-6, atol=2.0**-6)
    torch.testing.assert_close(logsumexp, expected[1])


def test_fake_tensors_are_those_of_the_operator() -> None:
    out, other = torch.randn(2, 5, 3, 4).transpose(1, 2), torch.randn(2, 3, 5, 4).bfloat16()
    sums = torch.randn(2, 5, 3).transpose(1, 2)
    for given in (out, out[:, 1:].clone(), out[..., ::2]):
        heads, width = given.shape[1], given.shape[3]
        arguments = (given, sums[:, :heads], other[:, :heads, :, :width], sums[:, :heads] + 1)
        torch.library.opcheck(merge_blocks, arguments, test_utils=("test_schema", "test_faketensor"))
