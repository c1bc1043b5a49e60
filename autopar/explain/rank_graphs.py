"""Rank graphs: what one rank of a plan runs, forward and backward, as the runtime gets it.

graphs = rank_graphs(source, plan, rank=0)
graphs.nodes                  all nodes of forward, then of backward: live ranges count them in this order
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.errors import ConfigurationError
from autopar.explain.recovered import query_of
from autopar.explain.source import Source
from autopar.graphs.forward_backward import Partition
from autopar.parallel_plan import Plan
from autopar.passes.lower import lower
from autopar.passes.micro_batches import for_micro_batches, joined_bytes
from autopar.passes.overlap import overlapped
from autopar.passes.partition import split_forward_backward
from autopar.planner.query import Query
from autopar.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class RankGraphs:
    """partition: the graphs of one micro-batch; joined_bytes: of what the micro-batches hand out together."""

    query: Query
    lowered: Program
    partition: Partition
    joined_bytes: float

    @property
    def nodes(self) -> list[fx.Node]:
        """Of forward, then of backward, without the outputs of the graphs."""
        return [node for graph in self.partition.graphs for node in graph.graph.nodes if node.op != "output"]


def rank_graphs(source: Source, plan: Plan, rank: int) -> RankGraphs:
    """Lower a plan without stages for one rank (`stage_graphs.py`: those with stages). Raises ConfigurationError for an
    unknown rank."""
    if not 0 <= rank < plan.num_ranks:
        raise ConfigurationError(f"rank {rank}: the plan has the ranks 0 to {plan.num_ranks - 1}")
    query = query_of(source, plan)
    lowered = lower(query.program, plan, rank=rank)
    partition = split_forward_backward(lowered, [n for n, operator in plan.operators.items() if operator.recompute])
    joined = 0.0
    if query.micro is not None:
        partition = for_micro_batches(lowered, partition).partition
        joined = joined_bytes(query.micro, lowered)
    return RankGraphs(query, lowered, overlapped(partition, plan.bucket_bytes, plan.product_chunks), joined)
