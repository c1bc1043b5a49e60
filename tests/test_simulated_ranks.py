from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.layouts.placement import Mesh
from tests.simulated_ranks import run_ranks

_c10d = torch.ops._c10d_functional
MESH = Mesh(("dp", "tp"), (2, 2))


def graph_of(target: object, *arguments: object) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.call_function(target, (graph.placeholder("x"), *arguments))
    graph.output((graph.call_function(_c10d.wait_tensor.default, (value,)),))
    return fx.GraphModule({}, graph)


def test_all_reduce_sums_over_the_group() -> None:
    module = graph_of(_c10d.all_reduce.default, "sum", "dp")
    outputs = run_ranks([module] * 4, [[torch.tensor([float(rank)])] for rank in range(4)], MESH)
    assert [float(output[0]) for output in outputs] == [2.0, 4.0, 2.0, 4.0]


def test_all_gather_over_two_axes_is_in_rank_order() -> None:
    module = graph_of(_c10d.all_gather_into_tensor.default, 4, "dp+tp")
    outputs = run_ranks([module] * 4, [[torch.tensor([rank])] for rank in range(4)], MESH)
    assert all(output[0].tolist() == [0, 1, 2, 3] for output in outputs)


def test_ranks_that_meet_in_different_collectives_fail() -> None:
    first, second = graph_of(_c10d.all_reduce.default, "sum", "dp"), graph_of(_c10d.broadcast.default, 0, "dp")
    with pytest.raises(AssertionError, match="different collectives"):
        run_ranks([first, first, second, second], [[torch.ones(1)]] * 4, MESH)
