"""Pipeline source: the program of one micro-batch of a plan with stages, and its stages, from what made the plan.

asked = pipeline_source(source, plan)
asked.stages(rank=5)          the graphs of every stage, on the places that rank 5 has in its rank group
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster, MixedCluster
from autopar.errors import ConfigurationError
from autopar.explain.source import Source
from autopar.parallel_plan import Plan
from autopar.planner.query import budget
from autopar.priced_stages import PipelineGraphs, stage_graphs
from autopar.program import MicroProgram
from autopar.step_program import StepProgram


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSource:
    """A plan with stages, the program of its micro-batches and the question it answers."""

    source: Source
    plan: Plan
    micro: MicroProgram

    @property
    def cluster(self) -> Cluster:
        return self.source.options.cluster

    @property
    def step(self) -> StepProgram:
        """What plays and prices the plan."""
        return StepProgram(self.plan, self.micro, self.cluster, self.source.options.optimizer)

    def group_of(self, rank: int) -> int:
        """The rank group of a rank. Raises ConfigurationError for a rank that the plan does not have."""
        for number, group in enumerate(self.plan.rank_groups):
            if group.first_rank <= rank < group.first_rank + group.size:
                return number
        raise ConfigurationError(f"rank {rank}: the plan has the ranks 0 to {self.plan.num_ranks - 1}")

    def stages(self, rank: int = 0) -> PipelineGraphs:
        """All stages, at the place that a rank has in its group."""
        place = rank - self.plan.rank_groups[self.group_of(rank)].first_rank
        return stage_graphs(self.plan, self.micro.program, self.cluster, place)

    def limit_bytes(self, group: int) -> float:
        """What a rank of a group may fill; where devices are of several kinds, no more than its own has."""
        limit, cluster = self.source.options.memory_limit, self.cluster
        if not isinstance(cluster, MixedCluster):
            return budget(limit, cluster)
        first = self.plan.rank_groups[group].first_rank
        part = max(index for index, begin in enumerate(cluster.first_ranks) if begin <= first)
        return min(budget(limit, cluster.parts[part]), budget(None, cluster.parts[part]))


def pipeline_source(source: Source, plan: Plan) -> PipelineSource:
    """The parts of a plan with stages. Raises PlanMismatchError where the model does not run in its micro-batches."""
    return PipelineSource(source, plan, source.in_parts(plan.micro_batches))
