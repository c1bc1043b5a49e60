"""Products in chunks beside their collectives: the same values on every rank, chunks of one beside the next one's."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from autopar.graphs.collective_nodes import ALL_GATHER, ALL_REDUCE, CHUNK_OF, REDUCE_SCATTER, describe, is_start
from autopar.layouts.placement import Mesh
from autopar.ops.row_chunks import row_chunk, rows_joined
from autopar.passes.overlap.chunk_products import chunk_products, chunked_products
from autopar.passes.overlap.early_starts import early_starts
from tests.passes.lowering.test_lower import FLAT, SQUARE, Case, Mlp, random_plan, tensor_parallel
from tests.passes.tokens import Tokens, sequence_parallel

MM = torch.ops.aten.mm.default
HALVES = {"all_reduce": 2, "all_gather": 2, "reduce_scatter": 2}


@pytest.fixture(scope="module")
def tokens() -> Case:
    torch.manual_seed(0)
    shape = (8, 4, 8)
    return Case(Tokens(8).double(), {name: torch.randn(shape, dtype=torch.double) for name in ("x", "y")})


def starts(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if is_start(node)]


@pytest.mark.parametrize("dim", [0, 1])
def test_row_and_column_parallel_layers_in_chunks_compute_the_same(tokens: Case, dim: int) -> None:
    plan = sequence_parallel(tokens, dim)
    whole = tokens.check(plan, bucket_bytes={}).partitions[0]
    cut = tokens.check(plan, bucket_bytes={}, chunks=HALVES).partitions[0]
    kinds = {found.kind for found in chunked_products(describe(list(whole.forward.graph.nodes)))}
    assert kinds == {"all_gather", "reduce_scatter"}
    chunks = [start.target for start in starts(cut.forward) if CHUNK_OF in start.meta]
    assert chunks == [ALL_GATHER, ALL_GATHER, REDUCE_SCATTER, REDUCE_SCATTER]


def test_the_collective_of_a_chunk_stands_in_front_of_the_product_of_the_next(tokens: Case) -> None:
    forward = tokens.check(sequence_parallel(tokens, 0), bucket_bytes={}, chunks=HALVES).partitions[0].forward
    order = [node.target for node in forward.graph.nodes if node.target is MM or CHUNK_OF in node.meta]
    assert order == [ALL_GATHER, ALL_GATHER, MM, MM, MM, REDUCE_SCATTER, MM, REDUCE_SCATTER]


@pytest.mark.exhaustive
def test_any_plan_in_chunks_computes_the_same(tokens: Case) -> None:
    cut = 0
    for mesh in (FLAT, SQUARE, Mesh(("dp", "tp"), (2, 3))):
        for seed in range(8):
            count = random.Random(seed).choice((2, 4))
            sizes = dict.fromkeys(HALVES, 400.0 * (seed % 2))
            parts = tokens.check(
                random_plan(tokens, mesh, seed), bucket_bytes=sizes, chunks=dict.fromkeys(HALVES, count)
            ).partitions
            cut += sum(CHUNK_OF in start.meta for graph in parts[0].graphs for start in starts(graph))
    assert cut > 20


def product_and_sum(rows: int) -> fx.GraphModule:
    """What a row-parallel layer of `rows` rows is on one rank."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(MM, (x, w))
    start = graph.call_function(ALL_REDUCE, (product, "sum", "tp"))
    wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,))
    result = graph.call_function(torch.ops.aten.tanh.default, (wait,))
    graph.output((result,))
    for node, shape in ((x, (rows, 6)), (w, (6, 5)), *((n, (rows, 5)) for n in (product, start, wait, result))):
        node.meta = {"local_shape": shape, "dtype": torch.float, "phase": "forward", "operator": "proj/mm#0"}
    start.meta |= {"group_axes": ("tp",), "full_bytes": rows * 20}
    return fx.GraphModule({}, graph)


def test_a_graph_before_and_after() -> None:
    after = early_starts(chunk_products(product_and_sum(rows=8), {"all_reduce": 2}), {})
    text = [str(node.target).removeprefix("aten.") for node in after.graph.nodes if node.op == "call_function"]
    reduce, wait = "_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"
    assert text[:6] == ["slice.Tensor", "mm.default", reduce, "slice.Tensor", "mm.default", reduce]
    assert text[6:8] == [wait, wait]
    assert text[8].startswith("<function rows_joined")
    assert text[9] == "tanh.default"
    assert [start.meta["full_bytes"] for start in starts(after)] == [80, 80]
    assert [start.meta["local_shape"] for start in starts(after)] == [(4, 5), (4, 5)]


@pytest.mark.parametrize(
    ("rows", "chunks"), [(7, {"all_reduce": 2}), (8, {"all_reduce": 3}), (8, {"all_gather": 2}), (8, {})]
)
def test_what_does_not_divide_or_is_not_named_stays_whole(rows: int, chunks: dict[str, int]) -> None:
    after = chunk_products(product_and_sum(rows), chunks)
    assert [str(node.target) for node in after.graph.nodes] == [
        str(node.target) for node in product_and_sum(rows).graph.nodes
    ]


def test_a_product_that_is_read_elsewhere_too_stays_whole() -> None:
    module = product_and_sum(rows=8)
    product = next(iter(module.graph.find_nodes(op="call_function", target=MM)))
    with module.graph.inserting_after(product):
        module.graph.call_function(torch.ops.aten.tanh.default, (product,))
    assert not list(chunked_products(describe(list(module.graph.nodes))))


def test_chunks_joined_in_another_order_are_noticed(tokens: Case) -> None:
    def swap(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.target is rows_joined:
                node.args = (list(reversed(node.args[0])), node.args[1])

    errors, _ = tokens.errors(sequence_parallel(tokens, 0), bucket_bytes={}, chunks=HALVES, change=swap)
    assert max(errors.values()) > 1e-3


@pytest.mark.parametrize(("groups", "chunks"), [(1, 2), (2, 3), (3, 2)])
def test_chunks_of_rows_join_to_the_rows(groups: int, chunks: int) -> None:
    x = torch.arange(24.0).view(12, 2)
    parts = [row_chunk(x, groups, index, chunks) for index in range(chunks)]
    assert torch.equal(rows_joined(parts, groups), x)
    assert all(part.is_contiguous() for part in parts)


def test_the_mlp_has_one_product_to_cut() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 6, dtype=torch.double), "y": torch.randn(8, 4, dtype=torch.double)}
    case = Case(Mlp().double(), inputs)
    part = case.check(tensor_parallel(case), bucket_bytes={}, chunks=HALVES).partitions[0]
    assert [start.target for start in starts(part.forward)] == [ALL_REDUCE, ALL_REDUCE]


def test_a_product_stays_whole_where_a_view_behind_it_does_not_divide() -> None:
    """8 rows and the 8 that travel are two chunks of 4; the 3 between them are none."""
    module = product_and_sum(rows=8)
    graph = module.graph
    (start,) = starts(module)
    (product,) = start.all_input_nodes
    product.meta["local_shape"] = (8, 6)
    value = product
    for shape in ((3, 16), (8, 6)):
        with graph.inserting_before(start):
            value = graph.call_function(torch.ops.aten.view.default, (value, list(shape)))
        value.meta = {**product.meta, "local_shape": shape}
    start.replace_input_with(product, value)
    start.meta["local_shape"] = (8, 6)
    (found,) = chunked_products(describe(list(graph.nodes)))
    assert not found.divides(2)
    assert not any(CHUNK_OF in node.meta for node in starts(chunk_products(module, {"all_reduce": 2})))
