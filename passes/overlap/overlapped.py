"""Overlap: what runs of a lowered step is this, so that communication hides behind computation.

    forward, backward   -->   chunk_products   -->   early_starts, with collectives in buckets (`bucket_collectives`)

The passes keep what is computed, bit by bit but for the order in which a bucket adds up its ranks. The planner, the
simulator and the runtime all call `overlapped`, so that what is priced and what is counted is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch.fx import GraphModule

from autopar.graphs.forward_backward import Partition
from autopar.passes.overlap.chunk_products import chunk_products
from autopar.passes.overlap.early_starts import early_starts
from autopar.passes.runner import run_passes

WHOLE: Mapping[str, int] = MappingProxyType({})
"""No product in chunks."""


def overlapped(
    partition: Partition, bucket_bytes: Mapping[str, float] | None, chunks: Mapping[str, int] = WHOLE
) -> Partition:
    """Both graphs of a rank with products in chunks and collectives in buckets, started early and awaited late; as
    lowered where `bucket_bytes` is None. chunks: per kind of collective, of `Plan.product_chunks`."""
    return replace(
        partition,
        forward=overlapped_graph(partition.forward, bucket_bytes, chunks),
        backward=None if partition.backward is None else overlapped_graph(partition.backward, bucket_bytes, chunks),
    )


def overlapped_graph(
    graph_module: GraphModule, bucket_bytes: Mapping[str, float] | None, chunks: Mapping[str, int] = WHOLE
) -> GraphModule:
    """One graph of a rank, with the same inputs and outputs."""
    if bucket_bytes is None:
        return graph_module
    if chunks:
        graph_module = run_passes(graph_module, (chunk_products,), chunks)[0]
    return run_passes(graph_module, (early_starts,), bucket_bytes)[0]
