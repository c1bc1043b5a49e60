"""Played costs: two plans of which one has stages or both have, compared by what their steps take when they are played.

    a device's share of the step, on the average of all devices       this      other     difference
    layers.*.up        compute                                        3.1 ms    3.2 ms    -0.1 ms
    layers.*.up        all_reduce over tp                             0.8 ms    -         +0.8 ms
    schedule           waiting: bubble, transfers, less overlap       1.2 ms    -0.4 ms   +1.6 ms

The layouts of a pipeline are no assignment of one problem, so the sums of costs of `comparison.py` do not exist for it.
What runs does: every kernel and collective of the lowered stages, at the prices of the planner, counted per device
and averaged over all of them, since stages do different work. What is left of the simulated step is waiting. So the
differences add up to the difference of the two simulated steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost_models.program_costs import COMPUTE, ProgramAction
from autopar.explain.answers import Term
from autopar.explain.source import Source
from autopar.plans.parallel_plan import Plan
from autopar.request import Request
from autopar.simulation.bodies import Turn
from autopar.simulation.played_plan import checked_step, simulate_step
from autopar.simulation.step_program import StepProgram

SCHEDULE = "(schedule)"
WAITING = "waiting less overlap"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedCosts:
    """The seconds of one simulated step, and where an average device spends them; the terms add up to it."""

    step_seconds: float
    terms: tuple[Term, ...]


def played_costs(source: Source, plan: Plan, request: Request) -> PlayedCosts:
    """A plan of the source's program played on the cluster of `request`.

    Raises PlanMismatchError where the model does not run in the plan's micro-batches, and for the plan of another
    program.
    """
    step = checked_step(plan, source.program_of(plan), request.cluster, request.optimizer)
    seconds = simulate_step(step).step_seconds
    found = list(_spent(step))
    waiting = seconds - math.fsum(term.seconds for term in found)
    return PlayedCosts(step_seconds=seconds, terms=(*found, Term(SCHEDULE, WAITING, (), waiting)))


def schedule_in_words(plan: Plan) -> str:
    """ "1f1b, 4 micro-batches, stages layers.0 .. layers.1 on 2 ranks; layers.2 .. head on 2 ranks"."""
    parts = f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}"
    if not plan.in_stages:
        return f"no stages, {parts}, all {plan.num_ranks} ranks"
    groups = plan.rank_groups
    stages = [f"{stage.name} on {groups[stage.rank_group].size} ranks" for stage in plan.stages]
    return f"{plan.staged.schedule}, {parts}, stages {'; '.join(stages)}"


def _spent(step: StepProgram) -> Iterator[Term]:
    plan = step.plan
    graphs = step.graphs
    for group, ranks in enumerate(plan.rank_groups):
        share = ranks.size / plan.num_ranks
        passes = graphs.schedule.ranks[group]
        times = Counter[tuple[int, Turn]]((action.stage, action.kind) for action in passes)
        own = [graphs.of[stage] for stage in graphs.held_by(group)]
        for stage in own:
            kinds = {action.kind for action in passes if action.stage == stage.number}
            for body in step.bodies(stage, kinds):
                count = 1 if body.is_once_per_step else times[stage.number, body.turn]
                yield from counted(body.actions, share * count)
        for name, seconds in step.optimizer_parts(own).items():
            yield Term(name, "optimizer", (), share * seconds)


def counted(actions: Sequence[ProgramAction], times: float) -> Iterator[Term]:
    """The terms of these actions, which a step runs so many times."""
    for action in actions:
        is_kernel = action.stream == COMPUTE
        kind, axes = (COMPUTE, ()) if is_kernel else (action.kind, tuple(action.stream.split("+")))
        name = "(views)" if action.kind == "views" else action.name
        yield Term(name, kind, axes, action.seconds * times)
