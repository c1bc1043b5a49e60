"""Products that add to totals and begin with biases: the same sums, in one kernel."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.graphs.kernel_groups import kernel_groups
from autopar.runtime.kernels import kernels
from autopar.runtime.kernels.added_products import add_inside_products

aten = torch.ops.aten


def _backward(*, read_twice: bool) -> fx.GraphModule:
    graph = fx.Graph()
    x, dy, bias, total, total_bias = (graph.placeholder(n) for n in ("x", "dy", "bias", "total", "total_bias"))
    gradient = graph.call_function(aten.mm.default, (graph.call_function(aten.permute.default, (x, [1, 0])), dy))
    graph.call_function(aten.add_.Tensor, (total, gradient))
    graph.call_function(aten.add_.Tensor, (total_bias, bias))
    graph.output((gradient,) if read_twice else (dy,))
    return fx.GraphModule({}, graph)


def _targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def _added(graph: fx.Graph) -> list[object]:
    add_inside_products(graph)
    return _targets(graph)


def test_a_product_adds_to_its_total() -> None:
    x, dy, bias = torch.randn(5, 3), torch.randn(5, 2), torch.randn(2)
    total, total_bias = torch.ones(3, 2), torch.ones(2)
    kernels(_backward(read_twice=False), "eager")([x, dy, bias, total, total_bias])
    torch.testing.assert_close(total, 1 + x.T @ dy)
    assert torch.equal(total_bias, 1 + bias)
    assert _added(_backward(read_twice=False).graph) == [
        aten.permute.default,
        aten.addmm_.default,
        aten.add_.Tensor,
    ]


def test_a_product_that_something_else_reads_stays() -> None:
    graph_module = _backward(read_twice=True)
    assert _targets(graph_module.graph) == _added(graph_module.graph)


def test_the_product_and_its_total_are_one_kernel() -> None:
    for read_twice, kernel_count in ((False, 2), (True, 3)):
        graph = _backward(read_twice=read_twice).graph
        assert len(set(kernel_groups(graph, "eager").values())) == kernel_count


def _sized(node: fx.Node, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
    node.meta.update(local_shape=shape, dtype=dtype)
    return node


def _linear(*, bias: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32, read_twice: bool = False) -> fx.Graph:
    """y = bias + view(view(x w)) of x (4, 5) and w (5, 3), the bias made behind the product."""
    graph = fx.Graph()
    x, w = _sized(graph.placeholder("x"), 4, 5), _sized(graph.placeholder("w"), 5, 3)
    b = _sized(graph.placeholder("b"), *bias, dtype=dtype)
    product = _sized(graph.call_function(aten.mm.default, (x, w)), 4, 3)
    rows = _sized(graph.call_function(aten.reshape.default, (product, [2, 2, 3])), 2, 2, 3)
    rows = _sized(graph.call_function(aten.reshape.default, (rows, [1, 2, 2, 3])), 1, 2, 2, 3)
    late = _sized(graph.call_function(aten.neg.default, (b,)), *bias, dtype=dtype)
    added = _sized(graph.call_function(aten.add.Tensor, (late, rows)), 1, 2, 2, 3)
    graph.output((added, product) if read_twice else (added,))
    return graph


def test_a_product_begins_with_its_bias() -> None:
    x, w, b = torch.randn(4, 5), torch.randn(5, 3), torch.randn(3)
    (y,) = kernels(fx.GraphModule({}, _linear()), "eager")([x, w, b])
    torch.testing.assert_close(y, torch.addmm(-b, x, w).view(1, 2, 2, 3), rtol=0.0, atol=0.0)
    assert _added(_linear()) == [aten.neg.default, aten.addmm.default, aten.reshape.default]
    assert len(set(kernel_groups(_linear(), "eager").values())) == 2


@pytest.mark.parametrize(
    "graph",
    [_linear(read_twice=True), _linear(bias=(2, 1)), _linear(bias=(1,)), _linear(dtype=torch.float64)],
    ids=["read by something else", "no vector", "one number", "another dtype"],
)
def test_what_is_no_bias_is_added_behind_the_product(graph: fx.Graph) -> None:
    graph_module = fx.GraphModule({}, graph)
    assert _targets(graph_module.graph) == _added(graph_module.graph)
    assert len(set(kernel_groups(graph, "eager").values())) == 3
