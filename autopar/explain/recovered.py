"""Recovered: a plan of a source as an assignment of its problem again, whatever has been planned since.

recovered = recovered_plan(source, plan)      the question that the plan answered, priced on the plan's mesh
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import refuse_mixed
from autopar.explain.source import Source
from autopar.parallel_plan import Plan
from autopar.planner.choose_micro_batches import in_parts_of
from autopar.planner.constraints import parse_constraints
from autopar.planner.factorisation import Factorisation
from autopar.planner.optimizers import state_bytes
from autopar.planner.query import Query, budget, kernel_backend
from autopar.planner.recover import Recovered, recover
from autopar.planner.search import search_of
from autopar.planner.targets import find_wishes
from autopar.questions import Options


def query_of(source: Source, plan: Plan, options: Options | None = None) -> Query:
    """The question that a plan answers, in the micro-batches in which it runs. options: in place of the source's."""
    asked = options or source.options
    refuse_mixed(asked.cluster, "an explanation")
    constraints = parse_constraints(asked.constraints)
    program, kept = source.program, source.kept
    factorisation = kept.factorisations.recall(program, lambda: Factorisation(program))
    query = Query(
        program=program,
        cluster=asked.cluster,
        state_bytes=state_bytes(program, asked.optimizer, asked.cluster.device.kind),
        constraints=constraints,
        wishes=find_wishes(program, constraints, factorisation),
        budget_bytes=budget(asked.memory_limit, asked.cluster),
        kernel_backend=kernel_backend(asked.cluster),
        factorisation=factorisation,
        search=search_of(asked.mode, None),
        recompute=asked.recompute,
        hidden_share=plan.hidden_share,
        kept=kept,
    )
    if plan.micro_batches == 1:
        return query
    return in_parts_of(query, source.in_parts(plan.micro_batches))


def recovered_plan(source: Source, plan: Plan) -> Recovered:
    """The plan in its problem. Raises ConfigurationError for stages, PlanMismatchError for what is no choice."""
    return recover(replace(query_of(source, plan), warm_start=plan), plan)
