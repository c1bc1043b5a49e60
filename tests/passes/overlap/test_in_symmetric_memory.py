"""Products with their collective in symmetric memory: the same values on every rank, and what differs is found."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autopar.graphs.collective_nodes import describe
from autopar.graphs.live_ranges import memory_events
from autopar.layouts.placement import Mesh
from autopar.ops.symmetric_products import SYMMETRIC, gathered_products, product_scattered
from autopar.passes.lowering.checks import CheckFailed, check_graph, collective_order
from autopar.passes.overlap.in_symmetric_memory import multiply_in_symmetric_memory, symmetric_products
from tests.passes.lowering.test_lower import FLAT, SQUARE, Case, random_plan
from tests.passes.tokens import WIDTH, Gated, Tokens, sequence_parallel, split_as_megatron_does

BOTH = {"all_gather": ("tp",), "reduce_scatter": ("tp",)}
Change = Callable[[fx.GraphModule], None]


@pytest.fixture(scope="module")
def gated() -> Case:
    torch.manual_seed(0)
    inputs = {name: torch.randn((8, 4, WIDTH), dtype=torch.double) for name in ("x", "y")}
    return Case(Gated().double(), inputs)


@pytest.fixture(scope="module")
def tokens() -> Case:
    torch.manual_seed(0)
    shape = (8, 4, 8)
    return Case(Tokens(8).double(), {name: torch.randn(shape, dtype=torch.double) for name in ("x", "y")})


def calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target in SYMMETRIC]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [None, {}])
def test_products_in_symmetric_memory_compute_the_same_forward_and_backward(
    gated: Case, dim: int, bucket_bytes: dict[str, float] | None
) -> None:
    plan = split_as_megatron_does(gated.program, FLAT, dim)
    partition = gated.check(plan, bucket_bytes=bucket_bytes, symmetric=BOTH).partitions[0]
    for graph in partition.graphs:
        check_graph(graph.graph, FLAT, "test")
    forward, backward = (calls(graph) for graph in partition.graphs)
    assert [node.target for node in forward] == [gathered_products, product_scattered]
    assert [node.target for node in backward] == [gathered_products, product_scattered, product_scattered]
    assert {len(node.args[2]) for node in forward + backward} == {dim + 1}
    assert len(forward[0].args[1]) == 2  # gate and up


def test_what_is_gathered_for_a_gradient_of_weights_too_is_kept(gated: Case) -> None:
    """The gradient behind a row-parallel product goes into two products: only that of the rows takes the parts."""
    backward = gated.check(split_as_megatron_does(gated.program, FLAT, 1), symmetric=BOTH).partitions[0].backward
    call = calls(backward)[0]
    assert call.args[4] is True
    assert len(call.args[1]) == 1
    assert sorted(user.args[1] for user in call.users if user.target is operator.getitem) == [0, 1]


def test_a_kind_or_a_group_that_is_not_named_stays_as_it_is(tokens: Case) -> None:
    plan = sequence_parallel(tokens, 0)
    for groups in ({"all_gather": ("dp",)}, {"reduce_scatter": ()}):
        assert not calls(tokens.check(plan, symmetric=groups).partitions[0].forward)
    forward = tokens.check(plan, symmetric={"reduce_scatter": ("tp",)}).partitions[0].forward
    assert [node.target for node in calls(forward)] == [product_scattered]


@pytest.mark.exhaustive
def test_any_plan_in_symmetric_memory_computes_the_same(tokens: Case) -> None:
    found: dict[tuple[Any, ...], int] = {}
    for mesh in (FLAT, SQUARE, Mesh(("dp", "tp"), (2, 3))):
        names = ("dp", "tp", "dp+tp")
        for seed in range(12):
            groups = dict.fromkeys(BOTH, names)
            partition = tokens.check(random_plan(tokens, mesh, seed), bucket_bytes={}, symmetric=groups).partitions[0]
            for graph in partition.graphs:
                check_graph(graph.graph, mesh, "test")
                for call in calls(graph):
                    key = (call.target.__name__, len(call.args[2]), call.args[3])
                    found[key] = found.get(key, 0) + 1
    assert len(found) == 4, found  # both calls, along the first dim and along another


def rows_gathered_for(readers: Callable[[fx.Graph, fx.Node, list[fx.Node]], list[fx.Node]]) -> fx.GraphModule:
    """A gather of 2 x 6 rows on 4 ranks, and what `readers` makes of it with two weights."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "v", "w")]
    for node, shape in zip(given, ((2, 6), (6, 5), (6, 3)), strict=True):
        said(node, shape)
    c10d = torch.ops._c10d_functional
    sent = said(graph.call_function(torch.ops.aten.tanh.default, (given[0],)), (2, 6))
    start = said(graph.call_function(c10d.all_gather_into_tensor.default, (sent, 4, "tp")), (8, 6))
    start.meta |= {"group_axes": ("tp",), "full_bytes": 0}
    gathered = said(graph.call_function(c10d.wait_tensor.default, (start,)), (8, 6))
    graph.output(tuple(readers(graph, gathered, given[1:])))
    return fx.GraphModule({}, graph)


def said(node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    node.meta = {"local_shape": shape, "dtype": torch.float, "phase": "forward", "operator": "up/mm#0"}
    return node


def called(graph: fx.Graph, name: str, arguments: tuple[Any, ...], shape: tuple[int, ...]) -> fx.Node:
    return said(graph.call_function(getattr(torch.ops.aten, name).default, arguments), shape)


def test_several_products_of_the_same_rows_are_one_call_and_casts_of_weights_move() -> None:
    def readers(graph: fx.Graph, rows: fx.Node, weights: list[fx.Node]) -> list[fx.Node]:
        first = called(graph, "mm", (rows, weights[0]), (8, 5))
        bent = called(graph, "tanh", (first,), (8, 5))
        turned = called(graph, "permute", (weights[1], [0, 1]), (6, 3))
        return [bent, called(graph, "mm", (rows, turned), (8, 3))]

    after = multiply_in_symmetric_memory(rows_gathered_for(readers), BOTH)
    check_graph(after.graph, FLAT, "test")
    (call,) = calls(after)
    assert [weight.name for weight in call.args[1]] == ["v", "permute_default"]
    assert call.args[2:] == ((2,), 0, False, "tp")
    assert [str(node.target) for node in after.graph.nodes if node.op == "call_function"].count("aten.mm.default") == 0


def test_a_weight_that_comes_too_late_leaves_its_product_to_the_rows_that_are_kept() -> None:
    def readers(graph: fx.Graph, rows: fx.Node, weights: list[fx.Node]) -> list[fx.Node]:
        first = called(graph, "mm", (rows, weights[0]), (8, 5))
        bent = called(graph, "tanh", (first,), (8, 5))
        late = called(graph, "tanh", (weights[1],), (6, 3))
        return [bent, called(graph, "mm", (rows, late), (8, 3))]

    after = multiply_in_symmetric_memory(rows_gathered_for(readers), BOTH)
    check_graph(after.graph, FLAT, "test")
    (call,) = calls(after)
    assert [weight.name for weight in call.args[1]] == ["v"]
    assert call.args[4] is True


def test_rows_that_no_product_reads_and_a_product_that_contracts_them_stay() -> None:
    def contracts(graph: fx.Graph, rows: fx.Node, weights: list[fx.Node]) -> list[fx.Node]:
        turned = called(graph, "permute", (rows, [1, 0]), (6, 8))
        return [called(graph, "mm", (turned, rows), (6, 6))]

    for readers in (contracts, lambda graph, rows, weights: [called(graph, "tanh", (rows,), (8, 6))]):
        assert not symmetric_products(describe(list(rows_gathered_for(readers).graph.nodes)))


def test_rows_made_contiguous_for_a_kernel_beside_a_product_are_kept_for_it() -> None:
    def readers(graph: fx.Graph, rows: fx.Node, weights: list[fx.Node]) -> list[fx.Node]:
        product = called(graph, "mm", (rows, weights[0]), (8, 5))
        dense = graph.call_function(torch.ops.aten.contiguous.default, (rows,))  # as of `local_call.py`: no shape
        return [product, called(graph, "tanh", (dense,), (8, 6))]

    (call,) = calls(multiply_in_symmetric_memory(rows_gathered_for(readers), BOTH))
    assert [weight.name for weight in call.args[1]] == ["v"]
    assert call.args[4] is True


def test_every_rank_meets_in_the_same_calls(tokens: Case) -> None:
    parts = tokens.check(sequence_parallel(tokens, 1), symmetric=BOTH).partitions
    orders = [collective_order({"forward": part.forward}) for part in parts]
    assert all(order == orders[0] for order in orders)
    assert "gathered_products" in orders[0]["tp"][0]


def test_mapped_memory_lives_throughout_as_large_as_the_largest_call_needs(gated: Case) -> None:
    partition = gated.check(split_as_megatron_does(gated.program, FLAT, 0), symmetric=BOTH).partitions[0]
    ranges = memory_events(partition)
    end = max(live.last_index for live in ranges)
    block = 8 * 4 // 4 * WIDTH * 8  # bytes of a rank's rows; of a product's rows two blocks are mapped
    assert 2 * block in [live.bytes for live in ranges if (live.first_index, live.last_index) == (0, end)]
    names = [node.name for graph in partition.graphs for node in calls(graph)]
    while_they_run = [live for live in ranges if live.name in names and live.first_index == live.last_index]
    assert [live.bytes for live in while_they_run if live.bytes == 4 * block]  # gathered rows, or parts of a product


# mutations that the comparison, or the checker, must notice


def argument(target: Any, place: int, value: Any) -> Change:
    def change(module: fx.GraphModule) -> None:
        for node in calls(module):
            if node.target is target:
                node.args = (*node.args[:place], value, *node.args[place + 1 :])

    return change


@pytest.mark.parametrize(
    "change",
    [
        argument(gathered_products, 3, 0),
        argument(product_scattered, 3, 0),
        argument(product_scattered, 4, "avg"),
        argument(gathered_products, 2, (2, 4)),
    ],
    ids=["rows gathered along another dim", "scattered along another dim", "a mean", "other sizes of the rows"],
)
def test_a_wrong_dim_and_a_wrong_reduction_are_noticed(tokens: Case, change: Change) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        tokens.check(sequence_parallel(tokens, 1), symmetric=BOTH, change=change)


def test_a_wrong_group_and_wrong_rows_fail_in_the_checker(tokens: Case) -> None:
    plan = sequence_parallel(tokens, 1)
    for place, value, text in ((5, "dp", "no axes of"), (2, (4, 4), "as")):
        forward = tokens.check(plan, symmetric=BOTH).partitions[0].forward
        argument(product_scattered, place, value)(forward)
        with pytest.raises(CheckFailed, match=text):
            check_graph(forward.graph, FLAT, "test")


def test_the_ranks_of_another_axis_are_noticed(tokens: Case) -> None:
    """On 2 x 2 ranks; the other axis has as many, so that sizes say nothing."""

    def change(module: fx.GraphModule) -> None:
        for node in calls(module):
            node.args = (*node.args[:-1], {"dp": "tp", "tp": "dp"}[str(node.args[-1])])

    plan = random_plan(tokens, SQUARE, 4)
    groups = dict.fromkeys(BOTH, ("dp", "tp"))
    assert calls(tokens.check(plan, symmetric=groups).partitions[0].forward)
    errors, _ = tokens.errors(plan, symmetric=groups, change=change)
    assert max(errors.values()) > 1e-3
