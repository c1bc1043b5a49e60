from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.cost_models.kernel_seconds import KernelPrices, local_sizes
from autopar.cost_models.operator_sizes import ProductSizes, RowSizes, flops_of
from autopar.cost_models.program_costs import program_actions
from autopar.graphs.kernel_groups import group_reads_writes, kernel_groups
from autopar.hardware.cluster import Cluster
from autopar.hardware.device_curves import shared_curves
from autopar.hardware.devices import Device, preset_device
from autopar.layouts.placement import Mesh
from autopar.ops.experts import rows_at

aten = torch.ops.aten
A100: Device = replace(preset_device("A100-80"), curves=shared_curves("A100-80"))
PRICES = KernelPrices(device=A100)


def value(node: fx.Node, *shape: int) -> fx.Node:
    node.meta.update(local_shape=shape, dtype=torch.float16, operator="layers.0.mlp/x#0", phase="forward")
    return node


def linear_gelu(rows: int, *added: int) -> fx.Graph:
    """gelu(x w + bias), as a lowered graph has it; added: another shape of what is added."""
    graph = fx.Graph()
    x, w, bias = (
        value(graph.placeholder(n), *s) for n, s in (("x", (rows, 1024)), ("w", (1024, 4096)), ("b", added or (4096,)))
    )
    product = value(graph.call_function(aten.mm.default, (x, w)), rows, 4096)
    added = value(graph.call_function(aten.add.Tensor, (product, bias)), rows, 4096)
    graph.output((value(graph.call_function(aten.gelu.default, (added,)), rows, 4096),))
    return graph


def actions(graph: fx.Graph, backend: str, prices: KernelPrices = PRICES) -> list[tuple[str, float]]:
    found = program_actions(
        graph,
        "forward",
        cluster=Cluster.parse("1x2 A100-80"),
        mesh=Mesh(axis_names=("tp",), shape=(2,)),
        backend=backend,
        prices=prices,
        segment_of=lambda name: name.split("/")[0],
    )
    return [(action.kind, action.seconds) for action in found]


@pytest.mark.parametrize(
    ("backend", "kernels"),
    [("inductor", ["mm", "add"]), ("eager", ["mm", "gelu"]), ("torch", ["mm", "gelu"]), ("megatron", ["mm", "add"])],
)
def test_who_writes_the_kernels_decides_what_a_bias_costs(backend: str, kernels: list[str]) -> None:
    assert [kind for kind, _ in actions(linear_gelu(4096), backend)] == kernels


def test_a_fused_kernel_moves_its_bytes_once() -> None:
    graph = linear_gelu(8192, 8192, 4096)  # a residual: a bias is part of the product in both
    fused, single = (sum(s for _, s in actions(graph, backend)) for backend in ("megatron", "eager"))
    saved = 2 * 8192 * 4096 * 2  # the value between addition and GELU is neither written nor read
    assert single - fused == pytest.approx(saved / A100.memory_bytes_per_second, rel=0.25)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_kernels_of_other_sizes_have_prices_of_their_own(backend: str) -> None:
    prices = KernelPrices(device=A100)
    for sizes in ((256,), (4096,), (4096, 4096, 4096), (256,)):
        alone = actions(linear_gelu(*sizes), backend, KernelPrices(device=A100))
        assert actions(linear_gelu(*sizes), backend, prices) == alone
    other = replace(prices, product_dtype="float8_e4m3fn")
    fresh = KernelPrices(device=A100, product_dtype="float8_e4m3fn")
    assert actions(linear_gelu(4096), backend, other) == actions(linear_gelu(4096), backend, fresh)


def test_sizes_of_a_product_are_those_of_its_operands() -> None:
    graph = linear_gelu(256)
    actions(graph, "eager")  # describes the values
    product = next(node for node in graph.nodes if node.target is aten.mm.default)
    found = local_sizes(product, "cuda")
    assert isinstance(found, ProductSizes)
    assert (found.m, found.n, found.k, found.batch) == (256, 4096, 1024, 1)
    assert flops_of(found) == 2 * 256 * 4096 * 1024


def test_a_block_of_the_experts_works_on_its_own_rows_only() -> None:
    graph = fx.Graph()
    rows, weights, counts = (
        value(graph.placeholder(n), *s) for n, s in (("x", (1024, 512)), ("w", (2, 512, 256)), ("counts", (2,)))
    )
    call = value(
        graph.call_function(torch.ops.autopar.sorted_expert_linear.default, (rows, weights, counts, False)), 1024, 256
    )
    call.meta["own_rows"] = 2 / 8
    graph.output((call,))
    actions(graph, "eager")
    found = local_sizes(call, "cuda")
    assert isinstance(found, ProductSizes)
    assert (found.m, found.batch) == (1024 / 8, 2)


def test_a_lookup_is_priced_as_one_and_not_as_element_wise_traffic() -> None:
    graph = fx.Graph()
    table, rows = value(graph.placeholder("table"), 32000, 4096), value(graph.placeholder("rows"), 8)
    found = value(graph.call_function(aten.embedding.default, (table, rows)), 8, 4096)
    graph.output((value(graph.call_function(aten.gelu.default, (found,)), 8, 4096),))
    (_, lookup), (_, gelu) = actions(graph, "eager")
    assert local_sizes(found, "cuda") == RowSizes(family="lookup", row=8 * 4096)
    assert lookup > 2 * gelu  # both move as many bytes, but few rows are walked one after the other


def test_rows_that_change_places_cost_their_traffic_and_are_fused_by_who_fuses_chains() -> None:
    graph = fx.Graph()
    rows, order = value(graph.placeholder("x"), 4096, 2048), value(graph.placeholder("order"), 32768)
    moved = value(graph.call_function(rows_at, (rows, order)), 32768, 2048)
    graph.output((value(graph.call_function(aten.gelu.default, (moved,)), 32768, 2048),))
    (_, move), (_, gelu) = actions(graph, "eager")
    assert move == pytest.approx(gelu, rel=0.1)
    assert len(actions(graph, "inductor")) == len(actions(graph, "megatron")) == 1


def test_adding_to_a_wide_total_costs_its_traffic() -> None:
    graph = linear_gelu(4096)
    actions(graph, "eager")
    product = next(node for node in graph.nodes if node.target is aten.mm.default)
    kernel = [(product, group_reads_writes(graph, kernel_groups(graph, "eager"))[product])]
    wide = KernelPrices(device=A100, gradient_bytes=4)
    assert wide.seconds(kernel, adds_gradient=True) > wide.seconds(kernel) == PRICES.seconds(kernel, adds_gradient=True)
