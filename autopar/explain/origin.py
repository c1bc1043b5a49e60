"""Origin: who answers when a plan is asked more than it says.

plan = autopar.plan(model, inputs, cluster="8 H100-SXM")       plan.origin remembers program and question
plan.what_if(memory_limit="40GiB")                             searches again, warm: prices and optima are kept
plan = planner.bind(autopar.Plan.load("plan.json"))            a file has none: its model is given again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.capture import fingerprint
from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.explain.alone import wanted_names
from autopar.explain.answers import Comparison, Explanations, MemoryTable, RankProgram
from autopar.explain.code import rank_program
from autopar.explain.comparison import compare_plans
from autopar.explain.edits import edited
from autopar.explain.explained_choices import explain_choices
from autopar.explain.memory_moments import memory_table
from autopar.explain.source import Source
from autopar.passes.lowering.check_plan import refuse_unknown_names
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram
from autopar.questions import as_cluster
from autopar.request import Request
from autopar.rules.learning import adopt_rules

WISHES = frozenset(
    {
        "cluster", "mesh", "dims", "memory_limit", "constraints", "micro_batches", "schedule", "recompute",
        "offload", "lossy", "kernels", "cp", "ep",
        "expert_load", "expert_capacity", "replicated_experts", "mode", "time_limit", "discover",
        "deterministic",
    }
)  # fmt: skip
"""What `what_if` takes."""


def remembering(plan: Plan, source: Source) -> Plan:
    """The plan with the source that made it."""
    return replace(plan, origin=Remembered(source))


def bound(plan: Plan, source: Source) -> Plan:
    """A plan of unknown origin with this source. Raises PlanMismatchError for the plan of another program."""
    adopt_rules(source.program, plan.discovered)
    found = source.program_of(plan)
    program = found.program if isinstance(found, MicroProgram) else found
    adopt_rules(program, plan.discovered)
    mark = fingerprint(program)
    if plan.fingerprint != mark:
        raise PlanMismatchError(
            f"the plan was made for another graph (fingerprint {plan.fingerprint[:12]}, this one is {mark[:12]}): give "
            "the model, batch and sequence length that were planned"
        )
    refuse_unknown_names(plan, program)
    return remembering(plan, source)


@dataclass(frozen=True, slots=True, eq=False)
class Remembered:
    """The `PlanQuestions` of a plan whose source is known."""

    source: Source

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A plan that travels to another process leaves its origin behind."""
        return type(None), ()

    def explain(self, plan: Plan, name: str | None, vs: Plan | str | None, exact: bool) -> Explanations | Comparison:
        """The choices of the named operators and parameters, each with its runner-up."""
        names = wanted_names(plan, name, vs)
        if vs is not None:
            return compare_plans(self.source, plan, vs)
        return explain_choices(self.source, plan, names, exact)

    def memory(self, plan: Plan, rank: int | None) -> MemoryTable:
        """What one rank holds at its peak, or all rank groups."""
        return memory_table(self.source, plan, rank)

    def edit(self, plan: Plan, changes: Mapping[str, object]) -> Plan:
        """The plan with these choices fixed and the others made again."""
        found = edited(self.source, plan, changes)
        return remembering(replace(found, discovered=plan.discovered), self.source)

    def code(self, plan: Plan, rank: int) -> RankProgram:
        """What one rank runs, as Python."""
        return rank_program(self.source, plan, rank)

    def what_if(self, plan: Plan, changes: Mapping[str, object]) -> Plan:
        """The plan of the same question with these constraints changed. Raises ConfigurationError for an unknown
        constraint."""
        unknown = sorted(changes.keys() - WISHES)
        if unknown:
            raise ConfigurationError(f"what_if does not take {', '.join(unknown)}: write {', '.join(sorted(WISHES))}")
        asked: dict[str, Any] = dict(changes)
        if "cluster" in asked:
            asked["cluster"] = as_cluster(asked["cluster"])
        if "dims" in asked or "mesh" in asked:
            asked = {"dims": None, "mesh": None, **asked}
        warm = None if plan.in_stages else plan
        request: Request = replace(self.source.request, warm_start=warm, with_baselines=False, cache_dir=None, **asked)
        return remembering(self.source.plan(request), replace(self.source, request=request))
