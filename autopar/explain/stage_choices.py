"""Stage choices: why a parameter or an operator of a pipeline is what it is in its stage.

    layout      on the axes of the rank group, and which stage has it, on which ranks
    costs       the kernels and collectives that run under its name on a rank of the stage, per step
    runner-up   the best layouts of one micro-batch's program on one sub-mesh without the choice, all else free to
                follow; then the step that the plan's own stages and schedule would take with them

The planner chooses the layouts of all equal stages in one problem, that of the program of one micro-batch on one
sub-mesh, so that is what is solved again, as if memory were free; whether the stages fit with the answer is checked.
Stages on unequal groups were solved one problem per group, of which a plan keeps the part of its own stage only: there
the runner-up is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.explain.alone import alike, axes_in_links
from autopar.explain.answers import Explanation, Explanations, Switch, Term, signed
from autopar.explain.asked_step import AskedStep, asked_step
from autopar.explain.played_costs import counted
from autopar.explain.source import Source
from autopar.explain.stage_problem import StageProblem, stage_problem
from autopar.explain.switches import MOST_SEARCHES, switch_of, terms_by_name, without_choice
from autopar.planner.one_mesh.solved_again import Resolved, Resolver
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_bytes, format_seconds, layout_lines
from autopar.simulation.priced_stages import StepGraphs

PROBLEM = "runner-up: sum of costs on one sub-mesh over all micro-batches, memory free, as layouts of stages are chosen"


def explain_in_stages(source: Source, plan: Plan, names: Sequence[str], cpu_seconds: float) -> Explanations:
    """The explanation of every choice in `names`, equal layers of one stage together. cpu_seconds: of one search."""
    stages = _Stages(asked_step(source, plan))
    answer: _RunnersUp | ConfigurationError | PlanMismatchError
    try:
        answer = _RunnersUp(stage_problem(source, plan), plan, cpu_seconds)
    except (ConfigurationError, PlanMismatchError) as reason:
        answer = reason
    found = []
    for number, (name, *others) in enumerate(_alike(plan, names, stages)):
        switch, notes = None, list[str]()
        if not isinstance(answer, _RunnersUp):
            notes = [f"no runner-up: {answer}"]
        elif number < MOST_SEARCHES:
            switch, notes = answer.of(name)
        else:
            notes = ["runner-up not searched for: ask for this name alone"]
        found.append(
            Explanation(
                name=name,
                count=1 + len(others),
                layout=stages.layout(name),
                terms=stages.terms(name),
                switch=switch,
                nearest=plan.explanations.get(name, ()),
                notes=(*stages.notes(name), *notes),
            )
        )
    return Explanations(choices=tuple(found), axes=axes_in_links(plan))


def _alike(plan: Plan, names: Sequence[str], stages: _Stages) -> list[list[str]]:
    """Equal layers of the same stages."""
    groups: dict[object, list[str]] = {}
    for number, same in enumerate(alike(plan, names)):
        for name in same:
            groups.setdefault((number, stages.of(name)), []).append(name)
    return list(groups.values())


class _Stages:
    """Where a name runs, and what that takes."""

    def __init__(self, asked: AskedStep) -> None:
        self.asked, self.plan, self.graphs = asked, asked.plan, asked.graphs()

    def of(self, name: str) -> tuple[int, ...]:
        """The stages that run an operator or hold a parameter; none where it is a view that each reader makes."""
        return self._homes.get(name, ())

    def layout(self, name: str) -> tuple[str, ...]:
        home = self.of(name)
        own = self.graphs.of[home[0]].plan if home else self.plan
        return layout_lines(own, name)

    def notes(self, name: str) -> list[str]:
        return [f"in {', and in '.join(self._stage(stage) for stage in self.of(name))}"] if self.of(name) else []

    def _stage(self, stage: int) -> str:
        groups = [self.plan.rank_groups[group] for group in self.graphs.schedule.holders[stage]]
        ranks = " and ".join(f"{group.first_rank} .. {group.first_rank + group.size - 1}" for group in groups)
        return f"stage {stage} ({self.plan.stages[stage].name}) on ranks {ranks}"

    def terms(self, name: str) -> tuple[Term, ...]:
        """Per step, on one rank of the first stage that has it."""
        home = self.of(name)
        return tuple(self._terms(home[0]).get(name, ())) if home else ()

    def _terms(self, stage: int) -> Mapping[str, list[Term]]:
        if stage not in self._by_stage:
            self._by_stage[stage] = terms_by_name(_terms_of(self.asked, self.graphs, stage))
        return self._by_stage[stage]

    @cached_property
    def _by_stage(self) -> dict[int, Mapping[str, list[Term]]]:
        return {}

    @cached_property
    def _homes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {
            name: tuple(sorted(stages)) for name, stages in self.graphs.holders.items()
        }
        for number, stage in enumerate(self.graphs.of):
            for node in stage.lowered.context.program.graph.nodes:
                operator = str(node.meta.get("operator", ""))
                if node.op == "call_function" and operator and number not in found.get(operator, ()):
                    found[operator] = (*found.get(operator, ()), number)
        return found


def _terms_of(asked: AskedStep, graphs: StepGraphs, stage: int) -> list[Term]:
    """What a rank of the first group that has a stage pays for it per step."""
    own, step = graphs.of[stage], asked.step
    passes = [a for a in graphs.schedule.ranks[graphs.schedule.holders[stage][0]] if a.stage == stage]
    found = [
        term
        for body in step.bodies(own, {action.kind for action in passes})
        for term in counted(
            body.actions, 1 if body.is_once_per_step else sum(action.kind == body.turn for action in passes)
        )
    ]
    return found + [Term(name, "optimizer", (), seconds) for name, seconds in step.optimizer_parts([own]).items()]


@dataclass(eq=False)
class _RunnersUp:
    """The sub-mesh's problem of a plan, asked for what it chose not."""

    problem: StageProblem
    plan: Plan
    cpu_seconds: float

    @cached_property
    def resolver(self) -> Resolver:
        recovered = self.problem.recovered(self.plan)
        free = replace(recovered.query, budget_bytes=np.inf)
        return Resolver(replace(recovered, query=free), self.cpu_seconds)

    def of(self, name: str) -> tuple[Switch | None, list[str]]:
        """The runner-up of a choice, and what the pipeline would make of it; or why there is none."""
        try:
            recovered = self.resolver.recovered
            index = recovered.variable_of(name)
        except PlanMismatchError as reason:
            return None, [f"no runner-up: {reason}"]
        other = without_choice(self.resolver, index)
        if isinstance(other, str):
            return None, [other]
        return switch_of(recovered, other, index), [PROBLEM, self._played(other)]

    def _played(self, other: Resolved) -> str:
        solved = self.problem.solved(self.plan, other.labels)
        try:
            played = self.problem.played(self.plan, solved, self.modes)
        except (ConfigurationError, PlanMismatchError) as reason:
            return f"with it these stages cannot be played: {reason}"
        more = played.step_seconds - self.plan.objective_seconds  # collectives one by one, both
        said = f"with it these stages would step in {format_seconds(played.step_seconds)} ({signed(more)})"
        limit = self.problem.whole.budget_bytes
        if played.peak_bytes > limit:
            said += f", and not fit: {format_bytes(played.peak_bytes)} of {format_bytes(limit)} per rank"
        return said

    @cached_property
    def modes(self) -> tuple[str, ...]:
        """The way of recomputation of every stage."""
        return self.problem.modes(self.plan, self.problem.solved(self.plan, self.resolver.recovered.labels))
