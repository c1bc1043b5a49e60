"""A local operator talks to other ranks only along mesh axes that have some."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import fx

from autopar.graphs.collective_nodes import is_start
from autopar.layouts.placement import Mesh
from autopar.passes.implementations.local_context import LocalContext
from autopar.plans.plan_value import OperatorPlan


@pytest.mark.parametrize(("axes", "group"), [((0,), "dp"), ((0, 1), "dp"), ((0, 2), "dp+tp"), ((1,), None)])
def test_a_reduction_names_only_axes_with_a_second_rank(axes: tuple[int, ...], group: str | None) -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    value.meta = {"local_shape": (4,), "dtype": torch.float32, "operator": "sum#0"}
    plan = OperatorPlan(axes=(), inputs=(), outputs=())
    mesh = Mesh(("dp", "pods", "tp"), (2, 1, 2))
    context = LocalContext(node=value, plan=plan, mesh=mesh, coordinate=(0, 0, 0), graph=graph, seed=None)
    result = context.all_reduce(value, axes)
    starts = [node for node in graph.nodes if is_start(node)]
    assert [cast(str, start.args[-1]) for start in starts] == ([] if group is None else [group])
    assert (result is value) == (group is None)
