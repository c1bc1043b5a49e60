"""Origin: who answers when a plan is asked more than it says.

plan = autopar.plan(model, inputs, cluster="8 H100-SXM")       plan.origin remembers program and question
plan.what_if(memory_limit="40GiB")                             searches again, warm: prices and optima are kept
plan = planner.bind(autopar.Plan.load("plan.json"))            a file has none: its model is given again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from autopar.capture import fingerprint
from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.explain.source import Source
from autopar.parallel_plan import Plan
from autopar.passes.check_plan import refuse_unknown_names
from autopar.plan_answers import Comparison, Explanations, MemoryTable, RankProgram
from autopar.program import Program
from autopar.questions import as_cluster
from autopar.request import Request

WISHES = frozenset(
    {
        "cluster", "mesh", "dims", "memory_limit", "constraints", "micro_batches", "schedule", "recompute", "mode",
        "time_limit",
    }
)  # fmt: skip
"""What `what_if` takes."""


def remembering(plan: Plan, source: Source) -> Plan:
    """The plan with the source that made it."""
    return replace(plan, origin=Remembered(source))


def bound(plan: Plan, source: Source) -> Plan:
    """A plan of unknown origin with this source. Raises PlanMismatchError for the plan of another program."""
    program = _program_under(plan, source)
    mark = fingerprint(program)
    if plan.fingerprint != mark:
        raise PlanMismatchError(
            f"the plan was made for another graph (fingerprint {plan.fingerprint[:12]}, this one is {mark[:12]}): give "
            "the model, batch and sequence length that were planned"
        )
    refuse_unknown_names(plan, program)
    return remembering(plan, source)


def _program_under(plan: Plan, source: Source) -> Program:
    """The program that the plan would run: one micro-batch's where it has several, or stages."""
    if plan.pipeline is None and plan.micro_batches == 1:
        return source.program
    return source.in_parts(plan.micro_batches).program


@dataclass(frozen=True, slots=True, eq=False)
class Remembered:
    """The `Origin` of a plan: its source, and the questions that it answers; see the methods of `Plan`."""

    source: Source

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A plan that travels to another process leaves its origin behind."""
        return type(None), ()

    def explain(self, plan: Plan, names: Sequence[str], exact: bool) -> Explanations:
        found: Explanations = _answers().explain_choices(self.source, plan, names, exact)
        return found

    def compare(self, plan: Plan, other: Plan | str) -> Comparison:
        found: Comparison = _answers().compare_plans(self.source, plan, other)
        return found

    def memory(self, plan: Plan, rank: int | None) -> MemoryTable:
        found: MemoryTable = _answers().memory_table(self.source, plan, rank)
        return found

    def edit(self, plan: Plan, changes: Mapping[str, Any]) -> Plan:
        return remembering(_answers().edited(self.source, plan, changes), self.source)

    def code(self, plan: Plan, rank: int) -> RankProgram:
        found: RankProgram = _answers().rank_program(self.source, plan, rank)
        return found

    def what_if(self, plan: Plan, changes: Mapping[str, Any]) -> Plan:
        unknown = sorted(changes.keys() - WISHES)
        if unknown:
            raise ConfigurationError(f"what_if does not take {', '.join(unknown)}: write {', '.join(sorted(WISHES))}")
        asked: dict[str, Any] = dict(changes)
        if "cluster" in asked:
            asked["cluster"] = as_cluster(asked["cluster"])
        if "dims" in asked or "mesh" in asked:
            asked = {"dims": None, "mesh": None, **asked}
        warm = None if plan.pipeline is not None else plan
        request: Request = replace(self.source.request, warm_start=warm, with_baselines=False, cache_dir=None, **asked)
        return remembering(self.source.plan(request), replace(self.source, request=request))


def _answers() -> ModuleType:
    """What answers, loaded at the first question: it brings the solver library, which `import autopar` must not."""
    from autopar.explain import answers

    return answers
