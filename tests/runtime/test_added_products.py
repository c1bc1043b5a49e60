"""Products that add to totals: the same sums, without a gradient beside the total."""

from __future__ import annotations

import torch
from torch import fx

from autopar.cost_models.kernel_groups import kernel_groups
from autopar.runtime.kernels import kernels
from autopar.runtime.kernels.added_products import with_added_products

aten = torch.ops.aten


def _backward(*, read_twice: bool) -> fx.GraphModule:
    graph = fx.Graph()
    x, dy, bias, total, total_bias = (graph.placeholder(n) for n in ("x", "dy", "bias", "total", "total_bias"))
    gradient = graph.call_function(aten.mm.default, (graph.call_function(aten.permute.default, (x, [1, 0])), dy))
    graph.call_function(aten.add_.Tensor, (total, gradient))
    graph.call_function(aten.add_.Tensor, (total_bias, bias))
    graph.output((gradient,) if read_twice else (dy,))
    return fx.GraphModule({}, graph)


def _targets(graph_module: fx.GraphModule) -> list[object]:
    return [node.target for node in graph_module.graph.nodes if node.op == "call_function"]


def test_a_product_adds_to_its_total() -> None:
    x, dy, bias = torch.randn(5, 3), torch.randn(5, 2), torch.randn(2)
    total, total_bias = torch.ones(3, 2), torch.ones(2)
    kernels(_backward(read_twice=False), "eager")([x, dy, bias, total, total_bias])
    torch.testing.assert_close(total, 1 + x.T @ dy)
    assert torch.equal(total_bias, 1 + bias)
    assert _targets(with_added_products(_backward(read_twice=False))) == [
        aten.permute.default,
        aten.addmm_.default,
        aten.add_.Tensor,
    ]


def test_a_product_that_something_else_reads_stays() -> None:
    graph_module = _backward(read_twice=True)
    assert _targets(with_added_products(graph_module)) == _targets(graph_module)


def test_the_product_and_its_total_are_one_kernel() -> None:
    for read_twice, kernel_count in ((False, 2), (True, 3)):
        graph = _backward(read_twice=read_twice).graph
        assert len(set(kernel_groups(graph, "eager").values())) == kernel_count
