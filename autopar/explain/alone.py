"""Alone: what a plan says of itself where nobody knows its model, as that of a file.

    plan.explain("lm_head.weight")        its layout, and the nearest other choices that the file lists
    plan.memory()                         a ConfigurationError that says how the plan gets its model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from autopar.errors import ConfigurationError
from autopar.explain.answers import Explanation, Explanations
from autopar.plans.mesh_links import mesh_axes
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import layout_lines, matching_names, why_no_runner_up, without_numbers


class FileAlone:
    """The `PlanQuestions` of a plan without an origin."""

    def explain(self, plan: Plan, name: str | None, vs: Plan | str | None, exact: bool) -> Explanations:
        """Layouts, and other choices while everything else is held."""
        names = wanted_names(plan, name, vs)
        return _listed(plan, names) if names else _refuse("explain(vs=...)")

    def memory(self, plan: Plan, rank: int | None) -> NoReturn:
        """Raises ConfigurationError, as all that follow."""
        _refuse("memory()")

    def what_if(self, plan: Plan, changes: Mapping[str, object]) -> NoReturn:
        """See `memory`."""
        _refuse("what_if(...)")

    def edit(self, plan: Plan, changes: Mapping[str, object]) -> NoReturn:
        """See `memory`."""
        _refuse("edit(...)")

    def code(self, plan: Plan, rank: int) -> NoReturn:
        """See `memory`."""
        _refuse("code()")


def wanted_names(plan: Plan, name: str | None, vs: object) -> list[str]:
    """The parameters and operators that `Plan.explain(name)` means; none where it compares, with `vs`. Raises
    ConfigurationError for both or neither, and with the nearest names for a name that the plan does not have."""
    if (name is None) == (vs is None):
        raise ConfigurationError("explain takes a name, or vs= another plan: write one of the two")
    return [] if name is None else matching_names(plan, name)


def _listed(plan: Plan, names: Sequence[str]) -> Explanations:
    """What a plan itself says of some choices."""
    found = []
    for name, *others in alike(plan, names):
        nearest = plan.explanations.get(name, ())
        notes = () if nearest else tuple(why_no_runner_up(plan, name))
        layout = layout_lines(plan, name)
        found.append(Explanation(name=name, count=1 + len(others), layout=layout, nearest=nearest, notes=notes))
    return Explanations(choices=tuple(found), axes=axes_in_links(plan))


def _refuse(question: str) -> NoReturn:
    raise ConfigurationError(
        f"{question} needs the model, and a plan from a file has none: "
        "autopar.Planner(model, inputs, cluster=...).bind(plan) gives it one; on the command line, give --model"
    )


def axes_in_links(plan: Plan) -> tuple[str, ...]:
    """The axes of the mesh that split something, with their links."""
    return tuple(str(axis) for axis in mesh_axes(plan) if axis.size > 1)


def alike(plan: Plan, names: Sequence[str]) -> list[list[str]]:
    """Names that differ in their numbers alone and of which the plan says the same, in the order of the first."""
    groups: dict[object, list[str]] = {}
    for name in names:
        said = plan.parameters.get(name) or plan.operators.get(name)
        nearest = tuple(text for text, _ in plan.explanations.get(name, ()))
        groups.setdefault((without_numbers(name), said, nearest), []).append(name)
    return list(groups.values())
