"""Recovered: a plan of a source as an assignment of its problem again, whatever has been planned since.

recovered = recovered_plan(source, plan)      the question that the plan answered, priced on the plan's mesh
"""

from __future__ import annotations

from dataclasses import replace

from autopar.explain.source import Source
from autopar.graphs.expert_capacity import with_expert_capacity
from autopar.hardware.cluster import refuse_mixed
from autopar.planner.meshes.choose_micro_batches import in_parts_of
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.recovered_problem import Recovered, recover
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import asked_expert_way
from autopar.request import Request


def query_of(source: Source, plan: Plan, request: Request | None = None) -> Query:
    """The question that a plan answers, in the micro-batches in which it runs, the way of its experts and where they
    lie. request: in place of the source's."""
    asked = request or source.request
    refuse_mixed(asked.cluster, "an explanation")
    asked = replace(asked, time_limit=None, warm_start=None, kernels=plan.kernels)
    program = with_expert_capacity(source.program, plan.expert_capacity)
    query = Query.of(program, asked, kept=source.kept)
    constraints = replace(query.constraints, ep=query.constraints.ep or asked_expert_way(plan))
    query = replace(query, hidden_share=plan.hidden_share, offered=query.offered | plan.implementations)
    query = replace(query, constraints=constraints).placing(plan.replicated_experts, plan.expert_order)
    if plan.micro_batches == 1:
        return query
    query = replace(query, gather_once=plan.gather_once)
    return in_parts_of(query, with_expert_capacity(source.in_parts(plan), plan.expert_capacity))


def recovered_plan(source: Source, plan: Plan) -> Recovered:
    """The plan in its problem. Raises ConfigurationError for stages, PlanMismatchError for what is no choice."""
    return recover(replace(query_of(source, plan), warm_start=plan), plan)
