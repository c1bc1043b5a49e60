"""Choices: why a parameter or an operator is what it is in a plan.

    costs       what it pays per step, term by term (`planner/cost_terms.py`)
    holds       its bytes at the fullest moment of the step
    runner-up   the best plan in which it is otherwise, found by solving again with this choice forbidden
    binds       the limits without which the plan would cost less, and what the choice would then be (`binding.py`)

Layers that repeat are explained once. A search for a runner-up that ends at its time limit is reported as found, with
what is proven: no plan without the choice costs less than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import InfeasibleError
from autopar.explain.binding import Limits
from autopar.explain.recovered import recovered_plan
from autopar.explain.source import Source
from autopar.parallel_plan import Plan
from autopar.plan_answers import Explanation, Explanations, Switch, Term, alike, from_plan_alone
from autopar.plan_text import layout_lines
from autopar.planner.cost_terms import cost_terms
from autopar.planner.read import describe, switching_costs
from autopar.planner.recover import Recovered
from autopar.planner.resolve import Resolved, Resolver

SECONDS = 10.0
"""CPU seconds of one search for a runner-up, unless it is asked to be exact."""
EXACT_SECONDS = 3600.0
MOST_SEARCHES = 6
"""Runners-up that one answer searches for; of further choices it says the nearest ones only. exact: all."""


def explain_choices(source: Source, plan: Plan, names: Sequence[str], exact: bool) -> Explanations:
    """The explanation of every choice in `names`, equal layers together. Raises ConfigurationError and
    PlanMismatchError where the plan is none of its source's."""
    if plan.pipeline is not None:
        return from_plan_alone(plan, names)
    recovered = recovered_plan(source, plan)
    resolver = Resolver(recovered, EXACT_SECONDS if exact else SECONDS)
    limits = Limits(source, plan, resolver)
    by_name = _by_name(cost_terms(recovered))
    nearest = switching_costs(recovered.built, recovered.labels)
    held = _held_bytes(resolver)
    found = []
    for number, (name, *others) in enumerate(alike(plan, names)):
        index = recovered.variable_of(name)
        is_searched = exact or number < MOST_SEARCHES
        switch, notes = _switch(resolver, index) if is_searched else (None, ("runner-up not searched for: exact=True",))
        found.append(
            Explanation(
                name=name,
                count=1 + len(others),
                layout=layout_lines(plan, name),
                terms=tuple(by_name.get(name, ())),
                nbytes=held.get(index),
                nearest=nearest.get(name, ()),
                switch=switch,
                bindings=limits.of(index),
                notes=notes,
            )
        )
    return Explanations(choices=tuple(found))


def _by_name(terms: Sequence[Term]) -> Mapping[str, list[Term]]:
    found: dict[str, list[Term]] = {}
    for term in terms:
        found.setdefault(term.name, []).append(term)
    return found


def _held_bytes(resolver: Resolver) -> dict[int, float]:
    """Decision -> its bytes at the fullest moment of the plan, by the memory model."""
    labels = resolver.recovered.labels
    return {index: float(sizes[labels[index]]) for index, sizes in resolver.model.at(resolver.fullest).items()}


def _switch(resolver: Resolver, index: int) -> tuple[Switch | None, tuple[str, ...]]:
    """The runner-up of a decision, or why there is none."""
    recovered = resolver.recovered
    if len(recovered.built.variables[index].costs) < 2:
        return None, ("there is no other choice",)
    try:
        other = resolver.without_choice(index)
    except InfeasibleError as error:
        return None, (f"no runner-up: {error}",)
    return switch_of(recovered, other, index), ()


def switch_of(recovered: Recovered, other: Resolved, index: int) -> Switch:
    """The way from a plan to the best one that was found without its choice `index`."""
    seconds = other.objective - recovered.objective
    return Switch(
        choice=describe(other.built.variables[index], int(other.labels[index])),
        seconds=seconds,
        at_least=min(seconds, other.lower_bound - recovered.objective),
        followers=_changed(recovered, other) - 1,
        needed_memory=bool(other.rows),
    )


def _changed(recovered: Recovered, other: Resolved) -> int:
    """Parameters and operators that two plans choose differently."""
    return sum(
        1
        for mine, its, label, label_of_other in zip(
            recovered.built.variables, other.built.variables, recovered.labels, other.labels, strict=True
        )
        if mine.kind in ("parameter", "operator") and describe(mine, int(label)) != describe(its, int(label_of_other))
    )
