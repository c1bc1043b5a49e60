"""Switches: the way from a plan to the best one without one of its choices, and what each choice pays.

other = without_choice(resolver, index)           the best plan without a choice, or why there is none
switch_of(recovered, other, index)                runner-up, seconds more, how many others follow
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.errors import InfeasibleError
from autopar.explain.answers import Switch, Term
from autopar.planner.one_mesh.read_solution import describe
from autopar.planner.one_mesh.recovered_problem import Recovered
from autopar.planner.one_mesh.solved_again import Resolved, Resolver

MOST_SEARCHES = 6
"""Runners-up that one answer searches for; of further choices it says the nearest ones only."""


def terms_by_name(terms: Iterable[Term]) -> Mapping[str, list[Term]]:
    """Parameter or operator -> its terms."""
    found: dict[str, list[Term]] = {}
    for term in terms:
        found.setdefault(term.name, []).append(term)
    return found


def without_choice(resolver: Resolver, index: int) -> Resolved | str:
    """The best plan without a choice, or why there is none."""
    if len(resolver.recovered.built.variables[index].costs) < 2:
        return "there is no other choice"
    try:
        return resolver.without_choice(index)
    except InfeasibleError as reason:
        return f"no runner-up: {reason}"


def switch_of(recovered: Recovered, other: Resolved, index: int) -> Switch:
    """The way from a plan to the best one that was found without its choice `index`."""
    seconds = other.objective - recovered.objective
    return Switch(
        choice=describe(other.built.variables[index], int(other.labels[index]), recovered.mesh),
        seconds=seconds,
        at_least=min(seconds, other.lower_bound - recovered.objective),
        followers=_changed(recovered, other) - 1,
        needed_memory=bool(other.rows),
    )


def _changed(recovered: Recovered, other: Resolved) -> int:
    """Parameters and operators that two plans choose differently."""
    pairs = zip(recovered.built.variables, other.built.variables, recovered.labels, other.labels, strict=True)
    return sum(
        describe(mine, int(label), recovered.mesh) != describe(its, int(label_of_other), recovered.mesh)
        for mine, its, label, label_of_other in pairs
        if mine.kind in ("parameter", "operator")
    )
