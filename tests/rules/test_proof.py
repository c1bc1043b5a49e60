"""The proof of a rule notices what only looks right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.errors import ConfigurationError
from autopar.rules.binding import bind_rule
from autopar.rules.proof import block_of, call_for, equal_values, is_linear, prove_rule

aten = torch.ops.aten


def proven(target: object, arguments: tuple[object, ...], text: str) -> None:
    results = (target(*arguments),)  # type: ignore[operator]
    prove_rule(target, arguments, results, bind_rule(text, call_for(target, arguments, results)), text)


def test_multiples_alone_make_nothing_linear() -> None:
    def ratio(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor]:
        return (x * y / z,)

    arguments = tuple(torch.randn(6, 12) for _ in range(3))
    results = ratio(*arguments)
    assert torch.allclose(ratio(*(3 * x for x in arguments))[0], 3 * results[0])
    assert not is_linear(ratio, arguments, results, (True, True, True))
    assert is_linear(ratio, arguments, results, (True, False, False))


def test_complex_operands_may_be_linear() -> None:
    x = torch.complex(torch.randn(6, 12), torch.randn(6, 12))
    assert is_linear(aten.view_as_real.default, (x,), (torch.view_as_real(x),), (True,))


def test_a_block_does_not_show_what_lies_behind_it() -> None:
    x = torch.randn(12, 6)
    block = block_of(x, 0, 1, 2, 0)
    assert torch.equal(block, x[:6])
    assert block.untyped_storage().nbytes() == x.untyped_storage().nbytes() // 2


def test_an_operator_that_reads_beyond_its_block_has_no_split() -> None:
    arguments = (torch.randn(12, 6), torch.randn(12, 3), [12, 3], [6, 2], 1)
    with pytest.raises(ConfigurationError, match="'a' split in 2"):
        proven(aten.as_strided_scatter.default, arguments, "a _, _ _ -> a _")


def test_wide_values_agree_by_the_largest() -> None:
    expected = torch.tensor([1e8, 1.0])
    assert equal_values(expected + torch.tensor([0.0, 9.0]), expected, is_wide=True)
    assert not equal_values(expected + torch.tensor([0.0, 9.0]), expected)
    assert not equal_values(expected + torch.tensor([0.0, 1e6]), expected, is_wide=True)
    assert equal_values(torch.tensor([True]), torch.tensor([True]), is_wide=True)
