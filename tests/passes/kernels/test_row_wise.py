"""Which views keep the rows: those that leave dim 0 where it is."""

from __future__ import annotations

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
