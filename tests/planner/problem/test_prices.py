"""Prices are sums of what the cost models say of their parts: collectives, copies, kernels, statistics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import fx

from autopar.cost_models.operator_costs import copy_seconds
from autopar.graphs.kernel_groups import Traffic
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Layout, Mesh, Replicate, Shard
from autopar.layouts.redistribution import redistribution_steps
from autopar.planner.problem.prices import Prices
from autopar.planner.problem.strategies import LayoutSet, Strategies
from autopar.rules.engine import rule_for
from autopar.rules.rule import RingTraffic

CLUSTER = Cluster.parse("2x2 H100-SXM")
MESH = Mesh(("a", "b"), (2, 2))
R = Replicate()
BYTES = float(1 << 24)


@pytest.mark.parametrize(("dim", "is_transposing"), [(0, False), (1, True)])
def test_gathering_another_dim_than_the_first_pays_a_transposing_copy(dim: int, is_transposing: bool) -> None:
    prices = Prices(CLUSTER, MESH)
    (step,) = redistribution_steps((64, 64), (Shard(dim), R), (R, R), MESH)
    copy = float(copy_seconds(CLUSTER.device, BYTES, transposing=True))
    gather = prices.collective_seconds("all_gather", (0,), BYTES)
    assert copy > 0.0
    assert prices.step_seconds(step, BYTES) == pytest.approx(gather + is_transposing * copy, rel=1e-12)


def test_statistics_of_a_split_row_are_reduced_over_the_axes_that_split_it() -> None:
    """A softmax over rows that no axis, the first, the second, or both split: 1024 rows of two fp32 numbers."""
    rows, columns = 1024, 4096
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten._softmax.default, (x, 1, False))
    x.meta["val"] = node.meta["val"] = torch.empty(rows, columns, device="meta")
    rule = rule_for(node)
    assert rule is not None
    axes = ((None, None), ("n", None), (None, "n"), ("n", "n"))
    layouts: list[Layout] = [tuple(Shard(1) if name else R for name in names) for names in axes]
    both = LayoutSet.of(layouts, (rows, columns), MESH)
    strategies = Strategies(axes, (both,), (both,), np.array([1.0, 0.5, 0.5, 0.25]))
    prices = Prices(CLUSTER, MESH)
    kernel = prices.operator_costs(node, replace(rule, synchronised_bytes={}), strategies, Traffic((x,), (0,)), True)
    with_statistics = prices.operator_costs(node, rule, strategies, Traffic((x,), (0,)), True)
    reduced = [0.0] + [prices.collective_seconds("all_reduce", over, 8.0 * rows) for over in ((0,), (1,), (0, 1))]
    assert min(reduced[1:]) > 0.0
    np.testing.assert_allclose(with_statistics - kernel, reduced, rtol=1e-9)


def test_edges_of_blocks_are_as_long_as_the_rows_of_the_image_that_a_rank_holds() -> None:
    """A convolution whose images no axis, the first one, and beside it the second by samples splits."""
    shape, kernel = (64, 256, 512, 512), (256, 256, 3, 3)
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    convolution = torch.ops.aten.convolution.default
    node = graph.call_function(convolution, (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    x.meta["val"] = node.meta["val"] = torch.empty(shape, device="meta")
    weight.meta["val"] = torch.empty(kernel, device="meta")
    rule = rule_for(node)
    assert rule is not None
    rows = next(name for name in rule.exchanged_bytes if name in rule.inputs[0][2])
    samples = rule.inputs[0][0][0]
    axes = ((None, None), (rows, None), (rows, samples))
    layouts: list[Layout] = [(R, R), (Shard(2), R), (Shard(2), Shard(0))]
    images, weights = LayoutSet.of(layouts, shape, MESH), LayoutSet.of([(R, R)] * 3, kernel, MESH)
    strategies = Strategies(axes, (images, weights), (images,), np.array([1.0, 0.5, 0.25]))
    prices = Prices(CLUSTER, MESH)
    nbytes = rule.exchanged_bytes[rows]
    expected = [0.0, *(prices.collective_seconds("neighbours", (0,), held) for held in (nbytes, nbytes // 2))]
    assert expected[2] < 0.6 * expected[1]
    np.testing.assert_allclose(prices._edges(node, rule, strategies), expected, rtol=1e-9)


def test_what_a_hop_of_a_ring_takes_of_the_processor_is_never_hidden() -> None:
    """Two ranks, one hop forward: 1 MiB around and nothing home, beside a computation that hides it, or does not."""
    traffic = RingTraffic(nbytes=1 << 20, home=0, joined=0, names=frozenset(), joined_names=frozenset())
    free = Prices(replace(Cluster.parse("2x1 cpu"), collective_host_seconds=0.0), Mesh(("cp",), (2,)))
    busy = Prices(replace(Cluster.parse("2x1 cpu"), collective_host_seconds=1e-4), Mesh(("cp",), (2,)))
    hop = free.collective_seconds("neighbours", (0,), float(1 << 20))
    assert hop > 1e-3
    for computed, host in ((10.0, 1e-4), (2.0 * hop, 1e-4), (hop, 0.0)):
        priced = [prices.ring_seconds(traffic, "s", ("s",), computed) for prices in (free, busy)]
        assert priced[1] - priced[0] == pytest.approx(host, rel=1e-9), computed
        assert busy.ring_part(traffic, "s", ("s",), computed + priced[1]) == pytest.approx(priced[1], rel=1e-9)
