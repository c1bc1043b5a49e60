"""Bound graphs make their tensors on the device of the rank."""

from __future__ import annotations

import torch
from torch import fx

from autopar.layouts.placement import Mesh
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.bound_graphs import bind_groups

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")


def test_factories_make_their_tensors_on_the_device_of_the_rank() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    said = graph.call_function(aten.arange.start_step, (0, 4, 1), {"device": CPU})
    unsaid = graph.call_function(aten.full.default, ([4], 2.0))
    graph.output((graph.call_function(aten.add.Tensor, (x, said)), unsaid))
    groups = ProcessGroups(Mesh(("dp",), (1,)), "cpu")
    groups.device = META
    bound = bind_groups(fx.GraphModule({}, graph), groups)
    results = bound(torch.empty(4, device="meta"))
    assert [result.device for result in results] == [META, META]
    assert said.kwargs == {"device": CPU}, "the lowered graph is written into"
    (addition,) = bound.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert addition.kwargs == {}
