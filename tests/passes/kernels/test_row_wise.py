"""Which views keep the rows: those that leave dim 0 where it is."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from autopar.passes.kernels.row_wise import row_wise


@pytest.mark.parametrize(("order", "keeps"), [([0, 2, 1], True), ([1, 0, 2], False), ([1, 2, 0], False)])
def test_a_permute_keeps_the_rows_where_they_stay_in_front(order: list[int], keeps: bool) -> None:
    """All sizes are equal: the shapes alone do not tell."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    permuted = graph.call_function(torch.ops.aten.permute.default, (x, order))
    for node in (x, permuted):
        node.meta = {"val": torch.empty(4, 4, 4, device="meta")}
    found = row_wise(permuted, 4)
    assert (found is not None) == keeps
    assert found is None or (found.operands == (x,) and found.returns_rows)


def test_a_call_of_several_values_keeps_rows_and_so_does_each_of_them() -> None:
    graph = fx.Graph()
    rows = [graph.placeholder(name) for name in ("grad", "gate", "up")]
    both = graph.call_function(torch.ops.autopar.gated_backward.default, (*rows, "silu"))
    item = graph.call_function(operator.getitem, (both, 1))
    value = torch.empty(4, 6, device="meta")
    for node in (*rows, both, item):
        node.meta = {"val": (value, value) if node is both else value}
    found = row_wise(both, 4)
    assert found is not None
    assert (found.operands, found.returns_rows) == (tuple(rows), True)
    of_item = row_wise(item, 4)
    assert of_item is not None
    assert (of_item.operands, of_item.returns_rows) == ((both,), True)


def test_several_values_of_which_one_has_no_rows_keep_none() -> None:
    """Of a norm's gradients that of the rows has rows, and that of the weight is their sum."""
    graph = fx.Graph()
    shapes = ((4, 6), (4, 6), (6,), (4, 1))  # gradient, input, weight, rstd
    nodes = [graph.placeholder(f"x{number}") for number in range(len(shapes))]
    call = graph.call_function(torch.ops.autopar.rms_norm_backward.default, (*nodes, None))
    item = graph.call_function(operator.getitem, (call, 0))
    for node, shape in zip(nodes, shapes, strict=True):
        node.meta = {"val": torch.empty(shape, device="meta")}
    call.meta = {"val": (torch.empty(4, 6, device="meta"), torch.empty(6, device="meta"))}
    item.meta = {"val": torch.empty(4, 6, device="meta")}
    assert row_wise(call, 4) is None
    assert row_wise(item, 4) is None
