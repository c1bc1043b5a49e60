"""Rank graphs: what one rank of a plan runs, forward and backward, as the runtime gets it.

graphs = rank_graphs(source, plan, rank=0)
graphs.nodes                  all nodes of forward, then of backward: live ranges count them in this order
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.explain.recovered import query_of
from autopar.explain.source import Source
from autopar.graphs.forward_backward import Partition
from autopar.parallel_plan import Plan
from autopar.passes.lowering.chain import lowered_step, start_early
from autopar.passes.micro_batches import joined_bytes
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
    """Lower a plan without stages for one rank (`priced_stages.py`: those with stages). Raises ConfigurationError for
    an unknown rank."""
    plan.group_of(rank)
    query = query_of(source, plan)
    step = lowered_step(query.micro or query.program, plan, rank, until=start_early)
    lowered = step.only.program
    return RankGraphs(query, lowered, step.only.partition, joined_bytes(step.micro, lowered))
