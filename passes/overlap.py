"""Overlap: what runs of a lowered step is this, so that communication hides behind computation.

    forward, backward   -->   bucket_collectives   -->   early_starts

Both passes keep what is computed, bit by bit but for the order in which a bucket adds up its ranks. The planner, the
simulator and the runtime all call `overlapped`, so that what is priced and what is counted is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch.fx import GraphModule

from autopar.passes.bucket_collectives import bucket_collectives
from autopar.passes.early_starts import early_starts
from autopar.passes.partition import Partition
from autopar.passes.runner import Pass, run_passes

OVERLAP_PASSES: tuple[Pass[Mapping[str, float]], ...] = (bucket_collectives, early_starts)


def overlapped(partition: Partition, bucket_bytes: Mapping[str, float] | None) -> Partition:
    """Both graphs of a rank with their collectives in buckets, started early and awaited late; as lowered where
    `bucket_bytes` is None."""
    return replace(
        partition,
        forward=overlapped_graph(partition.forward, bucket_bytes),
        backward=None if partition.backward is None else overlapped_graph(partition.backward, bucket_bytes),
    )


def overlapped_graph(graph_module: GraphModule, bucket_bytes: Mapping[str, float] | None) -> GraphModule:
    """One graph of a rank, with the same inputs and outputs."""
    if bucket_bytes is None:
        return graph_module
    return run_passes(graph_module, OVERLAP_PASSES, bucket_bytes)[0]
