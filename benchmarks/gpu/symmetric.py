"""Products beside their collective on all devices: one behind the other, in chunks, and in symmetric memory.

    all_gather, 4 parts      0.52 ms whole, 0.45 ms in chunks, 0.41 ms in symmetric memory, 0.40 predicted

A gather of rows in front of a product, and a scatter of rows behind one, as tensor parallelism has them with sequence
parallelism. Without devices, or where they do not reach each other's memory, the row says why that way was refused.
What all ways compute is compared with the first: a difference is an error of the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar._compat import map_symmetric_memory
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.symmetric_seconds import symmetric_seconds
from autopar.graphs.symmetric_sizes import symmetric_sizes
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.ops.symmetric_products import gathered_products, product_scattered
from benchmarks.gpu.ranks import num_ranks, on_ranks, slowest
from benchmarks.gpu.stage import Place, Row, attempted
from benchmarks.gpu.timing import median_seconds

CHUNKS = 4
TOLERANCE = 0.02
"""Of the largest result: bf16 keeps 8 bits, and every way adds up ranks in another order."""
Product: TypeAlias = Callable[[Tensor, Tensor, int], Tensor]
"""(rows, weight, chunks) -> what a rank has then."""
_c10d = torch.ops._c10d_functional


def run(place: Place, sizes: Sequence[tuple[int, int, int]], rehearsed_ranks: int) -> Iterator[Row]:
    """sizes: (rows of all ranks, inner, columns) of the product of one rank, in bf16."""
    ranks = num_ranks(place, rehearsed_ranks)
    for kind in ("all_gather", "reduce_scatter"):
        for rows, inner, columns in sizes:
            case = f"{kind} {rows} x {inner} x {columns}"
            shape = (rows // (ranks if kind == "all_gather" else 1), inner, columns)
            yield attempted(case, lambda kind=kind, shape=shape: on_ranks(place, ranks, measured, kind, ranks, shape))  # type: ignore[misc]


def measured(place: Place, kind: str, ranks: int, shape: tuple[int, int, int]) -> Row:
    """On every rank. Raises ArithmeticError where the ways differ."""
    torch.manual_seed(dist.get_rank())
    rows, weight = (_random(size, place) for size in (shape[:2], shape[1:]))
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    node, product = _WAYS[kind]
    ways: dict[str, Callable[[], Tensor]] = {
        "whole": lambda: product(rows, weight, 1),
        "chunks": lambda: product(rows, weight, CHUNKS),
    }
    found: Row = {"ranks": ranks}
    refused = _refusal(place, group, symmetric_sizes(node(*shape, ranks)).mapped_bytes)
    if refused:
        found["refused"] = refused
    else:
        ways["symmetric"] = lambda: _IN_SYMMETRIC_MEMORY[kind](rows, weight, group)
    expected = ways["whole"]()
    for name, way in ways.items():
        error = float((way() - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE:
            raise ArithmeticError(f"{name} is off by {error:.3g} of the largest result, {TOLERANCE} is allowed")
        found[f"{name}_seconds"] = slowest(median_seconds(way, place.device), place.device)
    computed, waited = _predicted(node(*shape, ranks), ranks)
    return {**found, "predicted_seconds": computed + waited}


def _refusal(place: Place, group: str, nbytes: int) -> str:
    """Why a group has no symmetric memory; "" where it has. All ranks say the same, or hang until their limit."""
    if not place.on_cuda:
        return "symmetric memory is CUDA's"
    try:
        map_symmetric_memory(group, nbytes)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _gathered(rows: Tensor, weight: Tensor, chunks: int) -> Tensor:
    parts = [_started("all_gather_into_tensor", part) for part in rows.chunk(chunks)]
    ranks = dist.get_world_size()
    made = [(_c10d.wait_tensor(part) @ weight).unflatten(0, (ranks, -1)) for part in parts]
    return torch.cat(made, 1).flatten(0, 1)


def _scattered(rows: Tensor, weight: Tensor, chunks: int) -> Tensor:
    ranks = dist.get_world_size()
    parts = [part.flatten(0, 1) for part in rows.unflatten(0, (ranks, -1)).chunk(chunks, 1)]  # type: ignore[no-untyped-call]
    made = [_started("reduce_scatter_tensor", part @ weight) for part in parts]
    return torch.cat([_c10d.wait_tensor(part) for part in made])


def _started(kind: str, x: Tensor) -> Tensor:
    arguments = () if kind.startswith("all_gather") else ("sum",)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    started: Tensor = getattr(_c10d, kind)(x.contiguous(), *arguments, dist.get_world_size(), group)
    return started


def _gather_node(rows: int, inner: int, columns: int, ranks: int) -> fx.Node:
    graph = fx.Graph()
    x, weight = _given(graph, (rows, inner)), _given(graph, (inner, columns))
    node = graph.call_function(gathered_products, (x, [weight], (rows,), 0, False, "tp"))
    node.meta = {"local_shape": ((rows * ranks, columns),), "dtype": (torch.bfloat16,), "group_axes": ("tp",)}
    return node


def _scatter_node(rows: int, inner: int, columns: int, ranks: int) -> fx.Node:
    graph = fx.Graph()
    operands = _given(graph, (rows, inner)), _given(graph, (inner, columns))
    node = graph.call_function(product_scattered, (*operands, (rows,), 0, "sum", "tp"))
    node.meta = {"local_shape": (rows // ranks, columns), "dtype": torch.bfloat16, "group_axes": ("tp",)}
    return node


_WAYS: Mapping[str, tuple[Callable[..., fx.Node], Product]] = {
    "all_gather": (_gather_node, _gathered),
    "reduce_scatter": (_scatter_node, _scattered),
}
_IN_SYMMETRIC_MEMORY: Mapping[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "all_gather": lambda rows, weight, group: gathered_products(rows, [weight], rows.shape[:1], 0, False, group)[0],
    "reduce_scatter": lambda rows, weight, group: product_scattered(rows, weight, rows.shape[:1], 0, "sum", group),
}


def _given(graph: fx.Graph, shape: tuple[int, int]) -> fx.Node:
    node = graph.placeholder("x")
    node.meta = {"local_shape": shape, "dtype": torch.bfloat16}
    return node


def _random(shape: Sequence[int], place: Place) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=place.device)


def _predicted(node: fx.Node, ranks: int) -> tuple[float, float]:
    cluster = Cluster.detect(ranks)
    return symmetric_seconds(node, cluster, Mesh(("tp",), (ranks,)), KernelPrices(device=cluster.device))
