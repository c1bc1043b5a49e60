"""Prices of products in symmetric memory: as many parts as ranks, and what the products do not hide of their copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.cost_models.collective_costs import collective_seconds
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.symmetric_seconds import symmetric_seconds
from autopar.graphs.symmetric_sizes import symmetric_sizes
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.layouts.placement import Mesh
from autopar.ops.symmetric_products import gathered_products, product_scattered

CLUSTER, MESH = Cluster.parse("1x4 H100-SXM"), Mesh(("tp",), (4,))
PRICES = KernelPrices(device=CLUSTER.device)
MIB = 2**20


def gathered(rows: int = 4096, inner: int = 8192, columns: int = 2048, dim: int = 0, keep: bool = False) -> fx.Node:
    graph = fx.Graph()
    operands = [given(graph, (rows, inner)), given(graph, (inner, columns))]
    node = graph.call_function(gathered_products, (operands[0], [operands[1]], (rows,), dim, keep, "tp"))
    shapes = ((4 * rows, columns), *(((4 * rows, inner),) if keep else ()))
    node.meta = {"local_shape": shapes, "dtype": (torch.bfloat16,) * len(shapes), "group_axes": ("tp",)}
    return node


def scattered(rows: int = 16384, inner: int = 2048, columns: int = 8192, dim: int = 0) -> fx.Node:
    graph = fx.Graph()
    operands = [given(graph, (rows, inner)), given(graph, (inner, columns))]
    node = graph.call_function(product_scattered, (*operands, (rows,), dim, "sum", "tp"))
    node.meta = {"local_shape": (rows // 4, columns), "dtype": torch.bfloat16, "group_axes": ("tp",)}
    return node


def given(graph: fx.Graph, shape: tuple[int, int]) -> fx.Node:
    node = graph.placeholder("x")
    node.meta = {"local_shape": shape, "dtype": torch.bfloat16}
    return node


def test_bytes_are_those_that_torch_holds() -> None:
    """4096 rows of 8192 in bf16 are 64 MiB; of the product of 16384 rows a part has as many."""
    expected = {
        gathered(): (64, 256),  # the block that others read; the rows of all
        gathered(keep=True): (64, 0),  # which are returned then
        gathered(dim=1): (64, 256 + 64 + 64),  # rows and product in another order
        gathered(dim=1, keep=True): (64, 256 + 64 + 64),
        scattered(): (128, 256),  # two parts; the parts of all
        scattered(dim=1): (128, 256 + 64),
    }
    found = {node: symmetric_sizes(node) for node in expected}
    assert [(s.mapped_bytes / MIB, s.working_bytes / MIB) for s in found.values()] == list(expected.values())
    assert {s.ranks for s in found.values()} == {4}


@pytest.mark.parametrize("node", [gathered(), scattered()])
def test_products_that_take_longer_than_their_copies_hide_them(node: fx.Node) -> None:
    computed, waited = symmetric_seconds(node, CLUSTER, MESH, PRICES)
    slow = replace(CLUSTER, intra_link=slower(20.0))
    same, waited_slow = symmetric_seconds(node, slow, MESH, PRICES)
    assert same == computed
    assert waited == 0.0 < waited_slow
    copy = float(collective_seconds("neighbours", 64.0 * MIB, GroupTopology.of(slow, (4,), (0,)), slow))
    assert 2 * copy < waited_slow < 3 * copy  # one part is computed before the first copy, or behind the last


def slower(times: float):  # type: ignore[no-untyped-def]
    link = CLUSTER.intra_link
    rates = tuple((ranks, rate / times) for ranks, rate in link.traits.ring_rates)
    traits = replace(link.traits, ring_rates=rates)
    return replace(link, bytes_per_second=link.bytes_per_second / times, traits=traits)


def test_rows_that_change_places_and_rows_that_are_kept_cost_what_they_move() -> None:
    plain, moved, kept = (
        symmetric_seconds(node, CLUSTER, MESH, PRICES)[0] for node in (gathered(), gathered(dim=1), gathered(keep=True))
    )
    assert plain < kept < moved
