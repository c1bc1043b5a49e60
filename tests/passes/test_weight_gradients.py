"""Backward in two halves: together they are the whole, and the second half is what nobody waits for."""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.weight_gradients import split_backward

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


def test_only_weights_are_late() -> None:
    graphs = split_backward(_backward(sent=True), 1)
    late = [node.target for node in graphs.weights.graph.nodes if node.op == "call_function"]
    assert late.count(aten.mm.default) == 2
    assert [n.target for n in graphs.inputs.graph.nodes].count(aten.mm.default) == 2


def test_what_leads_to_one_weight_alone_is_late_as_a_whole() -> None:
    graphs = split_backward(_backward(sent=False), 0)
    assert graphs.weight_totals == (0, 1)
    assert [n for n in graphs.inputs.graph.nodes if n.target is aten.mm.default] == []
