"""Casts stand beside what they cast or what reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.passes.tidy.place_casts import is_cast, place_casts
from tests.passes.tidy_graphs import check_pass, names

X = torch.randn(4, 4)


def test_casts_of_inputs_stand_before_their_first_reader() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        narrow = w.to(torch.bfloat16)
        return x.sin().to(torch.bfloat16) @ narrow

    nodes = check_pass([place_casts], function, X, X)
    assert names(nodes) == ["sin", "_to_copy", "_to_copy", "mm"]
    assert nodes[2].all_input_nodes[0].op == "placeholder"


def test_returned_casts_stand_behind_their_operand() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.sin()
        second = x.cos()
        return second, first.to(torch.float64)

    assert names(check_pass([place_casts], function, X)) == ["sin", "_to_copy", "cos"]


def test_only_changes_between_floating_dtypes_are_casts() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.to(torch.float64), x.to(torch.int64), x.sin()

    assert [is_cast(node) for node in check_pass([], function, X)] == [True, False, False]
