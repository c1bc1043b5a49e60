"""Prices of lowered programs: every value has a shape, also those between the operators of the captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import autopar
from autopar.cost_models.copy_costs import copy_seconds
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.program_costs import program_actions
from autopar.cost_models.program_timeline import issued, wait_positions
from autopar.cost_models.simulator import simulate
from autopar.errors import ConfigurationError
from autopar.graphs.copy_nodes import COPY_FROM_HOST, COPY_TO_HOST, WAIT_COPY
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh

aten = torch.ops.aten


def test_intermediates_of_which_the_lowering_says_nothing_have_a_price() -> None:
    """A convolution with split input channels adds its bias on one rank; the block of the bias is such a value."""
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 4, 3))
    options: dict[str, Any] = {"dims": {"tp": 2}, "loss_fn": lambda output, _: output.pow(2).mean(), "mode": "fast"}
    plan = autopar.plan(model, torch.randn(4, 4, 8, 8), cluster="2 cpu", with_baselines=False, **options)
    assert plan.operators["2/convolution#0"].axes == ("ci",)
    assert plan.predicted.step_seconds > 0


ROWS = 4096


def offloaded() -> fx.Graph:
    """x leaves beside two products, and comes back beside a third; each is awaited in front of the last."""
    graph = fx.Graph()

    def add(name: str, target: Any, *operands: Any) -> fx.Node:
        node = graph.call_function(target, operands, name=name) if operands else graph.placeholder(name)
        node.meta |= {"local_shape": (ROWS, ROWS), "dtype": torch.float16, "operator": f"{name}#0"}
        return node

    x, weight = add("x", None), add("weight", None)
    leaving = add("leaving", COPY_TO_HOST, x)
    y = add("y", aten.mm.default, x, weight)
    parked = add("parked", WAIT_COPY, leaving, x)
    coming = add("coming", COPY_FROM_HOST, parked, torch.device("cuda"))
    z = add("z", aten.mm.default, y, weight)
    there = add("there", WAIT_COPY, coming, parked)
    graph.output(add("out", aten.mm.default, there, z))
    return graph


def test_copies_to_the_host_run_beside_kernels_at_the_price_of_their_link() -> None:
    cluster, graph = Cluster.parse("8 A100"), offloaded()
    mesh, prices = Mesh(("dp",), (8,)), KernelPrices(device=cluster.device)

    def actions(on: Cluster) -> Any:
        return program_actions(graph, "forward", cluster=on, mesh=mesh, backend="eager", prices=prices, segment_of=str)

    found = actions(cluster)
    assert [(one.kind, one.stream) for one in found] == [
        ("copy_to_host", "to host"), ("mm", "compute"), ("copy_from_host", "from host"), ("mm", "compute"),
        ("mm", "compute"),
    ]  # fmt: skip
    nbytes = 2.0 * ROWS * ROWS
    assert cluster.host is not None
    out, mm, back = found[:3]
    assert out.nbytes == nbytes
    assert out.seconds == pytest.approx(copy_seconds(nbytes, cluster.host, "to_host", 8))
    assert back.seconds == pytest.approx(copy_seconds(nbytes, cluster.host, "from_host", 8))
    timeline = simulate(issued(found, wait_positions(graph.nodes)))
    # the first product runs beside the copy out, the second beside the copy back, the third behind both
    beside = [max(copy.seconds, mm.seconds) for copy in (out, back)]
    assert timeline.makespan_seconds == pytest.approx(sum(beside) + mm.seconds)
    with pytest.raises(ConfigurationError, match="leaving#0 is copied to the host, and the cluster"):
        actions(replace(cluster, host=None))
