"""What follows from parameters alone is made once, and passes compute with it what they computed without."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.graphs.forward_backward import Partition
from autopar.passes.stages.once_per_step import Prepared, first_forward, prepare_parameters

aten = torch.ops.aten


def _partition() -> Partition:
    """h = x cat(w, w), saved: w, x, v' where v' = -v; dx = dy cat(w, w)', dv = v' dy."""
    forward = fx.Graph()
    w, v, x = (forward.placeholder(name) for name in ("w", "v", "x"))
    grown = forward.call_function(aten.cat.default, ([w, w],))
    minus = forward.call_function(aten.neg.default, (v,))
    minus.name = "minus"
    scaled = forward.call_function(aten.mul.Tensor, (x, 2.0))
    y = forward.call_function(aten.mm.default, (scaled, grown))
    forward.output((y, w, x, minus))
    backward = fx.Graph()
    w, x, saved, dy = (backward.placeholder(name) for name in ("w", "x", "minus", "dy"))
    again = backward.call_function(aten.cat.default, ([w, w],))
    turned = backward.call_function(aten.t.default, (again,))
    dx = backward.call_function(aten.mm.default, (dy, turned))
    dv = backward.call_function(aten.mul.Tensor, (backward.call_function(aten.exp.default, (saved,)), x))
    backward.output((dx, dv))
    return Partition(
        forward=fx.GraphModule({}, forward),
        backward=fx.GraphModule({}, backward),
        saved=(),
        parameters=frozenset({"w", "v"}),
    )


def _tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in ((2, 4), (3, 4), (3, 4), (3, 4)))


def _run(found: Prepared, fault: float = 0.0) -> tuple[Any, Any]:
    w, v, x, dy = _tensors()
    values = [value + fault for value in found.prepare(w, v)]
    y, *saved = found.forward(w, v, x, *(values[index] for index in found.of_forward))
    assert found.backward is not None
    return y, found.backward(*saved, dy, *(values[index] for index in found.of_backward))


def test_passes_compute_what_they_computed() -> None:
    whole = _partition()
    w, v, x, dy = _tensors()
    y, *saved = whole.forward(w, v, x)
    assert whole.backward is not None
    dx, dv = whole.backward(*saved, dy)
    found = prepare_parameters(whole)
    mine, (my_dx, my_dv) = _run(found)
    assert torch.equal(mine, y)
    assert torch.equal(my_dx, dx)
    assert torch.equal(my_dv, dv)
    assert not torch.equal(_run(found, fault=1.0)[0], y)


def test_forward_and_backward_share_one_copy() -> None:
    found = prepare_parameters(_partition())
    made = [node.target for node in found.prepare.graph.nodes if node.op == "call_function"]
    assert made.count(aten.cat.default) == 1
    assert made.count(aten.neg.default) == 1  # also where backward knows it as a saved value
    assert found.parameters == ("w", "v")
    assert found.backward is not None
    left = [
        node.target
        for graph in (found.forward.graph, found.backward.graph)
        for node in graph.nodes
        if node.op == "call_function"
    ]
    assert aten.cat.default not in left
    assert aten.exp.default not in left
    assert left.count(aten.mm.default) == 2


def test_the_first_forward_makes_what_is_prepared_and_hands_it_on() -> None:
    w, v, x, _ = _tensors()
    found = prepare_parameters(_partition())
    first = first_forward(found.forward, found)
    results = first(w, v, x)
    own = len(results) - found.count
    values = found.prepare(w, v)
    expected = found.forward(w, v, x, *(values[index] for index in found.of_forward))
    for mine, plain in zip((*results[:own], *results[own:]), (*expected, *values), strict=True):
        torch.testing.assert_close(mine, plain)
    order = [node.target for node in first.graph.nodes if node.op == "call_function"]
    assert order.index(aten.cat.default) == order.index(aten.mm.default) - 1, "it is made where it is first read"


def test_what_counts_as_anything_else_is_made_in_every_part() -> None:
    found = prepare_parameters(_partition(), ("w",))
    assert found.count == 2, "of v, saved and read"
    assert aten.cat.default in {node.target for node in found.forward.graph.nodes}
