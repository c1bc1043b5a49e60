"""Operators called directly give the same values, strides and dtypes as through `torch.ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.runtime.kernels.direct_calls import FUNCTIONS, METHODS, call_directly

aten = torch.ops.aten
X = torch.linspace(-1.0, 2.0, 12).view(3, 4)
W = torch.linspace(0.5, 1.5, 8).view(4, 2)
BATCH = X.view(1, 3, 4)
ROW = torch.arange(4.0)
INDEX = torch.tensor([[0], [3], [1]])
ARGUMENTS: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    aten._log_softmax.default: ((X, 1, False), {}),
    aten._softmax.default: ((X, -1, False), {}),
    aten.add.Tensor: ((X, ROW), {"alpha": 2}),
    aten.addmm.default: ((ROW[:2], X, W), {"beta": 0.5}),
    aten.amax.default: ((X, [0], True), {}),
    aten.bmm.default: ((BATCH, W.view(1, 4, 2)), {}),
    aten.cat.default: (([X, X], 1), {}),
    aten.clone.default: ((X.t(),), {"memory_format": torch.contiguous_format}),
    aten.div.Tensor: ((X, 3), {}),
    aten.embedding.default: ((X, INDEX[:2] % 3, 1), {}),
    aten.exp.default: ((X,), {}),
    aten.gelu.default: ((X,), {"approximate": "tanh"}),
    aten.log.default: ((X.abs() + 1,), {}),
    aten.mean.dim: ((X, [0], True), {"dtype": torch.float64}),
    aten.mm.default: ((X, W), {}),
    aten.mul.Tensor: ((X, X.t().contiguous().t()), {}),
    aten.native_layer_norm.default: ((X, [4], ROW, None, 1e-5), {}),
    aten.neg.default: ((X,), {}),
    aten.permute.default: ((X, [1, 0]), {}),
    aten.relu.default: ((X,), {}),
    aten.reshape.default: ((X.t(), [2, 6]), {}),
    aten.rsqrt.default: ((X.abs() + 1,), {}),
    aten.scatter.value: ((X, 1, INDEX, -1.0), {}),
    aten.select.int: ((X, 1, 2), {}),
    aten.sigmoid.default: ((X,), {}),
    aten.split_with_sizes.default: ((X, [1, 3], 1), {}),
    aten.squeeze.dim: ((BATCH, 0), {}),
    aten.sub.Tensor: ((X, 1.5), {"alpha": 2}),
    aten.sum.default: ((X,), {"dtype": torch.float64}),
    aten.sum.dim_IntList: ((X, [0], True), {}),
    aten.tanh.default: ((X,), {}),
    aten.transpose.int: ((X, 0, 1), {}),
    aten.unsqueeze.default: ((X, 1), {}),
    aten.where.self: ((X > 0, X, ROW), {}),
    aten.add_.Tensor: ((X, ROW), {}),
    aten.addmm_.default: ((torch.ones(3, 2), X, W), {}),
    aten.contiguous.default: ((X.t(),), {}),
    aten.copy_.default: ((X, ROW), {}),
    aten.detach.default: ((X,), {}),
    aten.expand.default: ((BATCH, [2, -1, 4]), {}),
    aten.mul_.Tensor: ((X, 3), {}),
    aten.view.default: ((X, [2, 6]), {}),
}


def graph_of(operator: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> fx.GraphModule:
    """A graph that applies the operator; tensors among the arguments are its inputs."""
    graph = fx.Graph()
    tensors = iter([graph.placeholder(f"x{i}") for i in range(len(tensors_of(arguments)))])
    given = torch.utils._pytree.tree_map(lambda x: next(tensors) if isinstance(x, Tensor) else x, arguments)
    graph.output(graph.call_function(operator, tuple(given), keywords))
    return fx.GraphModule({}, graph)


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def run(graph_module: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """On copies that keep their strides: some operators write their first argument."""
    return tensors_of(graph_module(*(tensor.clone() for tensor in tensors_of(arguments))))


def test_every_operator_of_the_tables_is_tried() -> None:
    assert ARGUMENTS.keys() == FUNCTIONS.keys() | METHODS.keys()


@pytest.mark.parametrize("operator", ARGUMENTS, ids=str)
def test_a_direct_call_gives_what_the_operator_gives(operator: Any) -> None:
    arguments, keywords = ARGUMENTS[operator]
    through_ops = graph_of(operator, arguments, keywords)
    expected = run(through_ops, arguments)
    call_directly(through_ops.graph)
    through_ops.recompile()
    assert not any(node.target is operator for node in through_ops.graph.nodes)
    found = run(through_ops, arguments)
    assert expected
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0.0, atol=0.0)
        assert other.stride() == one.stride()


def test_a_number_in_the_place_of_the_first_tensor_stays_with_the_operator() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.sub.Tensor, (1.0, x)))
    call_directly(graph)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [aten.sub.Tensor]


def test_metadata_of_nodes_is_kept() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.neg.default, (graph.placeholder("x"),))
    node.meta["operator"] = "head/neg#0"
    graph.output(node)
    call_directly(graph)
    assert [n.meta.get("operator") for n in graph.nodes if n.op == "call_function"] == ["head/neg#0"]
