"""What a parameter costs per step: the gather that is kept, and the optimizer's traffic over what a rank stores."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.cost_models.operator_costs import optimizer_seconds
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh, Replicate, Shard
from autopar.planner.problem.leaf_layouts import StateBytes, parameter_costs
from autopar.planner.problem.prices import TIE_BREAK_SECONDS, Prices
from autopar.planner.problem.strategies import LayoutSet


@pytest.mark.parametrize("step_traffic", [0.0, 28.0])
def test_a_rank_updates_what_it_stores_and_gathers_what_it_keeps(step_traffic: float) -> None:
    cluster, mesh, shape = Cluster.parse("1x4 H100-SXM"), Mesh(("dp",), (4,)), (4096, 1024)
    whole, part = (Replicate(),), (Shard(0),)
    labels = [(whole, whole), (part, part), (part, whole)]  # DDP, ZeRO-3, ZeRO-2
    stored, used = (LayoutSet.of([label[side] for label in labels], shape, mesh) for side in (0, 1))
    prices = Prices(cluster, mesh)
    state = StateBytes(gradient=4.0, optimizer=8.0, step_traffic=step_traffic)
    found = parameter_costs(stored, used, shape, 4, state, prices)
    elements = 4096 * 1024
    update = optimizer_seconds(cluster.device, [step_traffic * elements / ranks for ranks in (1, 4, 4)])
    assert (update > 1e-6).all() == (step_traffic > 0.0)
    kept = prices.redistribution_seconds(shape, 4.0 * elements, part, whole)
    beside = np.array([0.0, TIE_BREAK_SECONDS, TIE_BREAK_SECONDS + kept])
    np.testing.assert_allclose(found, update + beside, rtol=1e-9)
