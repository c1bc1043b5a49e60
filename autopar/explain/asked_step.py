"""Asked step: what a rank of a plan runs, and what prices it, from what made the plan.

asked = asked_step(source, plan)
asked.graphs(rank=5)          the graphs of every stage, on the places that rank 5 has in its rank group
asked.step                    plays and prices them
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autopar.explain.source import Source
from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram, Program
from autopar.request.memory_limit import budget
from autopar.simulation.priced_stages import StepGraphs, step_graphs
from autopar.simulation.step_program import StepProgram


@dataclass(frozen=True, eq=False)
class AskedStep:
    """A plan, the program of its micro-batches and the question it answers."""

    source: Source
    plan: Plan
    program: Program | MicroProgram

    @property
    def cluster(self) -> Cluster:
        """Where the plan runs."""
        return self.source.request.cluster

    @cached_property
    def step(self) -> StepProgram:
        """What plays and prices the plan."""
        return StepProgram(self.plan, self.program, self.cluster, self.source.request.optimizer)

    def graphs(self, rank: int = 0) -> StepGraphs:
        """All stages, at the place that a rank has in its group. Raises ConfigurationError for a rank that the plan
        does not have."""
        place = rank - self.plan.rank_groups[self.plan.group_of(rank)].first_rank
        return step_graphs(self.plan, self.program, self.cluster, place)

    def limit_bytes(self, group: int) -> float:
        """What a rank of a group may fill; where devices are of several kinds, no more than its own has."""
        limit, cluster = self.source.request.memory_limit, self.cluster
        if not isinstance(cluster, MixedCluster):
            return budget(limit, cluster)
        first = self.plan.rank_groups[group].first_rank
        part = max(index for index, begin in enumerate(cluster.first_ranks) if begin <= first)
        return min(budget(limit, cluster.parts[part]), budget(None, cluster.parts[part]))


def asked_step(source: Source, plan: Plan) -> AskedStep:
    """The step of a plan. Raises PlanMismatchError where the model does not run in its micro-batches."""
    return AskedStep(source, plan, source.program_of(plan))
