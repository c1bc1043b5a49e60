"""What the stages of a plan say beside their passes: how long gradients of shared parameters take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.schedules.list_scheduler import build_schedule
from autopar.simulation.priced_stages import StepGraphs


def tied(*stages: int) -> StepGraphs:
    """Four stages of one device each, two of them on a node; these hold one parameter together."""
    entry = SimpleNamespace(name="tied.weight", role="parameter", shape=(1024, 1024), dtype=torch.float32)
    inputs = [[entry] if stage in stages else [] for stage in range(4)]
    of: Any = tuple(SimpleNamespace(lowered=SimpleNamespace(program=SimpleNamespace(inputs=own))) for own in inputs)
    plan: Any = SimpleNamespace(
        stages=[SimpleNamespace(rank_group=group) for group in range(4)],
        staged=SimpleNamespace(groups=()),
        mesh=Mesh(("pp", "tp"), (4, 1)),
    )
    cut: Any = SimpleNamespace(holders={"tied.weight": frozenset(stages)})
    micro: Any = None
    return StepGraphs(
        plan=plan, cluster=Cluster.parse("2x2 H100-SXM"), schedule=build_schedule("1f1b", 4, 4), cut=cut, micro=micro,
        of=of, send_seconds=(), near=frozenset(),
    )  # fmt: skip


def test_the_gradient_of_a_parameter_that_two_nodes_hold_crosses_between_them() -> None:
    groups, across = tied(0, 3).shared_gradients(0)
    assert groups == [0, 3]
    assert tied(0, 3).shared_gradients(3) == ([0, 3], pytest.approx(across))
    beside, inside = tied(0, 1).shared_gradients(0)
    assert beside == [0, 1]
    assert across > 3 * inside > 0


def test_who_holds_nothing_together_adds_up_nothing() -> None:
    assert tied(0, 3).shared_gradients(1) == ([], 0.0)
    assert tied(2).shared_gradients(2) == ([], 0.0)
