"""The layouts of what crosses between equal rank groups: as it was left, but partial sums as they are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from autopar.layouts.placement import Layout, Partial, Replicate, Shard
from autopar.passes.stages.cut_stages import Crossing
from autopar.passes.stages.stage_plans import crossing_layouts
from autopar.plans.plan_value import OperatorPlan
from autopar.schedules.actions import parse_schedule

aten = torch.ops.aten


def crosses_as(left: Layout, asked: Layout) -> Layout:
    """The layout in which y crosses that one operator leaves as `left` and the next reads as `asked`."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y, z = (graph.call_function(target) for target in (aten.relu.default, aten.tanh.default))
    y.args, z.args = (x,), (y,)
    for node, name in ((y, "relu#0"), (z, "tanh#0")):
        node.meta = {"operator": name, "val": torch.empty(4, 4, device="meta")}
    x.meta = {"val": torch.empty(4, 4, device="meta")}
    operators = {
        "relu#0": OperatorPlan(axes=(None,), inputs=(left,), outputs=(left,)),
        "tanh#0": OperatorPlan(axes=(None,), inputs=(asked,), outputs=(asked,)),
    }
    own = SimpleNamespace(operators=operators)
    plan: Any = SimpleNamespace(staged=SimpleNamespace(groups=()), on_group=lambda group: own)
    crossing = Crossing(name="y", source=0, target=1, is_backward=False, node=y, readers=(z,))
    stages: Any = SimpleNamespace(crossings=(crossing,))
    return crossing_layouts(plan, stages, parse_schedule("0F0\n1F0"), 0)["y"]


@pytest.mark.parametrize(
    ("left", "asked", "crosses"),
    [
        (Shard(0), Replicate(), Shard(0)),  # the receiver gathers
        (Replicate(), Shard(1), Replicate()),
        (Partial(), Shard(1), Shard(1)),  # summed in front of the border, each rank its piece
        (Partial(), Partial(), Partial()),  # the reader goes on with partial sums
    ],
)
def test_only_partial_sums_cross_as_their_reader_asks(left: Any, asked: Any, crosses: Any) -> None:
    assert crosses_as((left,), (asked,)) == (crosses,)
