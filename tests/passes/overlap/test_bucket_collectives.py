"""Which collectives share a bucket: as many as its size holds, of one kind, group, dtype and level."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.graphs.collective_nodes import ALL_REDUCE, WAIT, describe
from autopar.passes.overlap.bucket_collectives import buckets


def reductions(*sizes: int, dtypes: tuple[torch.dtype, ...] = ()) -> fx.Graph:
    """Gradients of so many bytes that are reduced and returned."""
    graph = fx.Graph()
    results = []
    for number, size in enumerate(sizes):
        start = graph.call_function(ALL_REDUCE, (graph.placeholder(f"g{number}"), "sum", "dp"), name=f"r{number}")
        start.meta = {"full_bytes": size, "dtype": dtypes[number] if dtypes else torch.float32}
        results.append(graph.call_function(WAIT, (start,)))
    graph.output(tuple(results))
    return graph


def joined(graph: fx.Graph, limit: float) -> list[str]:
    found = buckets(describe(list(graph.nodes)), {"all_reduce": limit})
    return [" ".join(node.name for node in members) for members in found]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((40, 60), ["r0 r1"]),  # exactly full
        ((40, 61), []),
        ((40, 60, 1, 2), ["r0 r1", "r2 r3"]),
        ((40, 61, 39), ["r1 r2"]),
        ((101, 40, 60), ["r1 r2"]),  # larger than a bucket: alone
        ((30, 30, 30, 30), ["r0 r1 r2"]),
        ((40, 0, 60), ["r0 r2"]),  # nothing to send: in no bucket
    ],
)
def test_a_bucket_is_filled_to_its_size_and_no_further(sizes: tuple[int, ...], expected: list[str]) -> None:
    assert joined(reductions(*sizes), 100.0) == expected


def test_a_bucket_holds_one_dtype() -> None:
    graph = reductions(10, 10, 10, dtypes=(torch.float32, torch.bfloat16, torch.float32))
    assert joined(graph, 100.0) == ["r0 r2"]


def test_a_kind_without_a_size_stays_as_it_is() -> None:
    assert joined(reductions(10, 10), 0.0) == []


def test_what_does_not_say_its_bytes_is_in_no_bucket() -> None:
    """Collectives that operators start themselves do not."""
    graph = reductions(40, 10, 60)
    start = next(node for node in graph.nodes if node.name == "r1")
    del start.meta["full_bytes"]
    assert joined(graph, 1000.0) == ["r0 r2"]
