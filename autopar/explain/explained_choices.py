"""Choices: why a parameter or an operator is what it is in a plan.

    costs       what it pays per step, term by term (`cost_terms.py`)
    holds       its bytes at the fullest moment of the step
    runner-up   the best plan in which it is otherwise, found by solving again with this choice forbidden
    binds       the limits without which the plan would cost less, and what the choice would then be
    (`binding_limits.py`) no split    what the axes cannot split because it does not divide (`indivisible.py`)

Layers that repeat are explained once. A search for a runner-up that ends at its time limit is reported as found, with
what is proven: no plan without the choice costs less than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.explain.alone import alike, axes_in_links
from autopar.explain.answers import Explanation, Explanations
from autopar.explain.binding_limits import BindingLimits
from autopar.explain.cost_terms import cost_terms
from autopar.explain.indivisible import indivisible_names
from autopar.explain.recovered import recovered_plan
from autopar.explain.source import Source
from autopar.explain.stage_choices import explain_in_stages
from autopar.explain.switches import MOST_SEARCHES, switch_of, terms_by_name, without_choice
from autopar.planner.one_mesh.mesh_plan import EXACT_GAP
from autopar.planner.one_mesh.read_solution import switching_costs
from autopar.planner.one_mesh.solved_again import Resolver
from autopar.planner.one_mesh.within_memory import MEMORY_GAP
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import layout_lines

SECONDS = 10.0
"""CPU seconds of one search for a runner-up, unless it is asked to be exact."""
EXACT_SECONDS = 3600.0
NOT_SEARCHED = "runner-up not searched for: ask for this name alone, or for all with --exact"


def explain_choices(source: Source, plan: Plan, names: Sequence[str], exact: bool) -> Explanations:
    """The explanation of every choice in `names`, equal layers together. Raises ConfigurationError and
    PlanMismatchError where the plan is none of its source's."""
    if plan.in_stages:
        return explain_in_stages(source, plan, names, EXACT_SECONDS if exact else SECONDS)
    recovered = recovered_plan(source, plan)
    seconds, gap = (EXACT_SECONDS, EXACT_GAP) if exact else (SECONDS, MEMORY_GAP)
    resolver = Resolver(recovered, seconds, gap)
    limits = BindingLimits(source, plan, resolver)
    by_name = terms_by_name(cost_terms(recovered))
    nearest = switching_costs(recovered.built, recovered.labels, recovered.mesh)
    held = _held_bytes(resolver)
    found = []
    for number, (name, *others) in enumerate(alike(plan, names)):
        index = recovered.variable_of(name)
        is_searched = exact or number < MOST_SEARCHES
        other = without_choice(resolver, index) if is_searched else NOT_SEARCHED
        why_none = (other,) if isinstance(other, str) else ()
        found.append(
            Explanation(
                name=name,
                count=1 + len(others),
                layout=layout_lines(plan, name),
                terms=tuple(by_name.get(name, ())),
                nbytes=held.get(index),
                nearest=nearest.get(name, ()),
                switch=None if isinstance(other, str) else switch_of(recovered, other, index),
                bindings=limits.of(index),
                notes=(*why_none, *indivisible_names(recovered, index)),
            )
        )
    return Explanations(choices=tuple(found), axes=axes_in_links(plan), limits=limits.tried, next_gib=limits.next_gib)


def _held_bytes(resolver: Resolver) -> dict[int, float]:
    """Decision -> its bytes at the fullest moment of the plan, by the memory model."""
    labels = resolver.recovered.labels
    return {index: float(sizes[labels[index]]) for index, sizes in resolver.model.at(resolver.fullest).items()}
