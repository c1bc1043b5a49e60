"""Backward in two halves: together they are the whole, and the second half is what nobody waits for."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.passes.stages.weight_gradients import split_backward

aten = torch.ops.aten


def _backward(sent: bool) -> fx.GraphModule:
    """Two layers y = (x w) v: dv = h' dy, dh = dy v', dw = x' dh, dx = dh w'; dx is returned where it is sent."""
    graph = fx.Graph()
    x, h, w, v, dy = (graph.placeholder(name) for name in ("x", "h", "w", "v", "dy"))

    def call(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta = {"phase": "backward", "operator": node.name}
        return node

    dv = call(aten.mm.default, call(aten.t.default, h), dy)
    dh = call(aten.mm.default, dy, call(aten.t.default, v))
    dw = call(aten.mm.default, call(aten.t.default, x), dh)
    gradients: tuple[fx.Node, ...] = (dw, dv)
    if sent:
        gradients = (call(aten.mm.default, dh, call(aten.t.default, w)), *gradients)
    graph.output(gradients)
    return fx.GraphModule({}, graph)


def _tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 3, generator=generator) for _ in range(5)]


def test_both_halves_add_up_what_the_whole_adds_up() -> None:
    graphs = split_backward(_backward(sent=True), 1)
    dx, dw, dv = _backward(sent=True)(*_tensors())
    whole, halves = torch.ones(2, 3, 3), torch.ones(2, 3, 3)
    (sent,) = graphs.whole(*_tensors(), *(whole[index - 1] for index in graphs.totals))
    first, *kept = graphs.inputs(*_tensors(), *(halves[index - 1] for index in graphs.input_totals))
    assert torch.equal(sent, dx)
    assert torch.equal(first, dx)
    assert torch.equal(halves, torch.ones(2, 3, 3))  # nothing yet: all weights are late
    graphs.weights(*kept, *(halves[index - 1] for index in graphs.weight_totals))
    assert torch.equal(halves, whole)
    assert torch.equal(halves, torch.stack([1 + dw, 1 + dv]))


def test_of_several_results_the_second_half_keeps_the_one_that_it_reads() -> None:
    """A norm whose gradient is sent: the whole tuple would hold that gradient until the second half."""
    graph = fx.Graph()
    grad, x, mean, rstd, w, b = (graph.placeholder(name) for name in ("grad", "x", "mean", "rstd", "w", "b"))
    arguments = (grad, x, [4], mean, rstd, w, b, [True, True, True])
    both = graph.call_function(aten.native_layer_norm_backward.default, arguments)
    dx, dw, _ = (graph.call_function(operator.getitem, (both, index)) for index in range(3))
    graph.output((dx, graph.call_function(aten.mul.Tensor, (dw, 2.0))))
    graphs = split_backward(fx.GraphModule({}, graph), 1)
    x = torch.randn(3, 4)
    statistics = [x.mean(1, keepdim=True), torch.rsqrt(x.var(1, keepdim=True, correction=0))]
    sent, *kept = graphs.inputs(torch.randn(3, 4), x, *statistics, torch.ones(4), torch.zeros(4))
    assert sent.shape == (3, 4)
    assert [value.shape for value in kept] == [(4,)]
    total = torch.zeros(4)
    graphs.weights(*kept, total)
    assert torch.equal(total, 2.0 * kept[0])


def test_only_weights_are_late() -> None:
    graphs = split_backward(_backward(sent=True), 1)
    late = [node.target for node in graphs.weights.graph.nodes if node.op == "call_function"]
    assert late.count(aten.mm.default) == 2
    assert [n.target for n in graphs.inputs.graph.nodes].count(aten.mm.default) == 2


def test_what_leads_to_one_weight_alone_is_late_as_a_whole() -> None:
    graphs = split_backward(_backward(sent=False), 0)
    assert graphs.weight_totals == (0, 1)
    assert [n for n in graphs.inputs.graph.nodes if n.target is aten.mm.default] == []


def _convolution(wants_input: bool) -> fx.GraphModule:
    """y = conv(x, w) + b: dx is sent, dw and db are of the weight and the bias."""
    graph = fx.Graph()
    x, w, dy = (graph.placeholder(name) for name in ("x", "w", "dy"))
    options = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [wants_input, True, True])
    both = graph.call_function(aten.convolution_backward.default, (dy, x, w, *options))
    parts = [graph.call_function(operator.getitem, (both, index)) for index in range(3)]
    for node in (both, *parts):
        node.meta = {"phase": "backward", "operator": "conv"}
    graph.output(tuple(parts if wants_input else parts[1:]))
    return fx.GraphModule({}, graph)


def test_the_weight_of_a_convolution_is_late() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 5), (4, 3, 3, 3), (2, 4, 5, 5))
    x, w, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    dx, dw, db = _convolution(wants_input=True)(x, w, dy)
    graphs = split_backward(_convolution(wants_input=True), 1)
    assert graphs.weight_totals == (1, 2)
    sent, *kept = graphs.inputs(x, w, dy)
    assert torch.allclose(sent, dx, atol=1e-6)
    totals = [torch.zeros_like(dw), torch.zeros_like(db)]
    graphs.weights(*kept, *totals)
    assert torch.allclose(totals[0], dw, atol=1e-5)
    assert torch.allclose(totals[1], db, atol=1e-5)
    masks = [n.args[10] for n in graphs.inputs.graph.nodes if n.target is aten.convolution_backward.default]
    assert masks == [[True, False, False]]
    whole = [n.args[10] for n in graphs.whole.graph.nodes if n.target is aten.convolution_backward.default]
    assert whole == [[True, True, True]]  # one call where both halves run at once


def test_a_convolution_of_weights_alone_is_late_too() -> None:
    graphs = split_backward(_convolution(wants_input=False), 0)
    assert [n for n in graphs.inputs.graph.nodes if n.op == "call_function"] == []
    assert graphs.weight_totals == (0, 1)
