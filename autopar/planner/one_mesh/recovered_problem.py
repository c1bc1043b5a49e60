"""Recover: the problem that a plan answers, and the plan as one assignment of it.

    recovered = recover(query, plan)              prices again, finds the label of every decision by name and layout
    recovered.objective                           plan.objective_seconds, where the prices are still the same

A plan says what was chosen, not what else there was: explanations, edits and questions "what if" need the choices that
were left out, with their costs. What a plan leaves open (copies of inputs) takes its cheapest value beside the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.layouts.placement import Mesh, Shard
from autopar.passes.lowering.check_plan import OperatorPlans
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.nested_spans import joined_by
from autopar.planner.memory.recomputation import FORM_OF, FORM_STATES, ON_HOST, RECOMPUTED, expand
from autopar.planner.memory.time_segments import module_segments
from autopar.planner.one_mesh.mesh_plan import price
from autopar.planner.one_mesh.query import Query
from autopar.planner.one_mesh.read_solution import describe
from autopar.planner.one_mesh.restrict import narrowed
from autopar.planner.one_mesh.warm_start import Rows, rows_like
from autopar.planner.one_mesh.within_memory import form_labels, host_labels, kernel_seconds
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.constraint_targets import recompute_of
from autopar.planner.problem.factorisation import shape_of
from autopar.planner.solver import MemoryRow, evaluate, is_forbidden, solve
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import axes_at_work, parameter_in_words
from autopar.plans.plan_value import HOST

SHOWN_CHOICES = 4
"""An error about a choice that is none lists at most this many that are."""


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """A problem and the labels of a plan in it. plain: without recomputation; built: with it where the plan recomputes
    something, else `plain` itself; labels: (variables,) of `built`; links: what copies to the host have to hide behind,
    where those of the plan do."""

    query: Query
    mesh: Mesh
    plain: Built
    built: Built
    labels: Rows
    lifetimes: Lifetimes
    links: tuple[MemoryRow, ...] = ()

    @property
    def objective(self) -> float:
        """Seconds of the plan at the prices of `query`."""
        return evaluate(self.built.problem, self.labels)[0]

    def variable_of(self, name: str) -> int:
        """The number of the decision about a parameter or an operator. Raises ConfigurationError for another name."""
        for index, variable in enumerate(self.built.variables):
            if variable.name == name and variable.kind in ("parameter", "operator"):
                return index
        raise ConfigurationError(f"{name!r} is no parameter and no operator of the program")


def recover(query: Query, plan: Plan) -> Recovered:
    """The problem of `query` on the mesh of a plan without stages, and the plan in it.

    Raises ConfigurationError for a plan with stages, and PlanMismatchError naming the decision, the axis and the reason
    where the plan says something that is no choice, or choices that cannot stand side by side.
    """
    if plan.in_stages:
        raise ConfigurationError(
            f"a plan with stages ({len(plan.stages)} by {plan.staged.schedule}) is compared a sub-mesh at a "
            "time, and has no single problem of its layouts: plan without pp= to ask for one choice"
        )
    lifetimes = Lifetimes(query.program, module_segments)
    plain = price(query, plan.mesh)
    built = plain
    if plan.recomputed:
        lifetimes = joined_by(lifetimes, {name: plan.operators[name].recompute_at for name in plan.recomputed})
    if plan.recomputed or plan.waits_on_host or plan.saved_smaller:
        built = expanded(query, plain, lifetimes)
    if plan.saved_smaller:
        forms = form_labels(query, plan.mesh, lifetimes)
        built = forms.added(built, forms.candidates(plain))
    if plan.waits_on_host:
        return _with_host(query, plan, plain, built, lifetimes)
    return Recovered(query, plan.mesh, plain, built, _labels_of(built, plan), lifetimes)


def _with_host(query: Query, plan: Plan, plain: Built, built: Built, lifetimes: Lifetimes) -> Recovered:
    """A plan that uses the host, in the problem whose copies hide where its own do, else in that whose copies do not.
    built: without the host."""
    rows = [rows_like(variable, plain, plan) for variable in plain.variables]
    seconds = kernel_seconds(plain, np.array([own[0] if len(own) else 0 for own in rows]))
    for hidden in (True, False):
        wide, links, _ = host_labels(query, plan.mesh, lifetimes, hidden=hidden).added(built, seconds)
        labels = _labels_of(wide, plan)
        _, used = evaluate(replace(wide.problem, memory_rows=links), labels)
        if all(moved <= row.budget_bytes for moved, row in zip(used, links, strict=True)):
            break
    return Recovered(query, plan.mesh, plain, wide, labels, lifetimes, links)


def _labels_of(built: Built, plan: Plan) -> Rows:
    """Raises PlanMismatchError for what is no choice, and for choices that cannot meet."""
    rows = {index: agreeing(variable, built, plan) for index, variable in enumerate(built.variables)}
    for index, found in rows.items():
        if not len(found):
            raise _no_choice(built.variables[index], plan)
    return completed(built, rows, plan.mesh)


def expanded(query: Query, plain: Built, lifetimes: Lifetimes) -> Built:
    """The problem with recomputation, as far as the question allows it."""
    return expand(plain, lifetimes, query.recompute, recompute_of(query.program, query.constraints))


def agreeing(variable: Variable, built: Built, plan: Plan, *, any_implementation: bool = False) -> Rows:
    """The labels of a variable that say what the plan says, or all of that but by which implementation an operator
    runs; none where the plan says something else."""
    rows = rows_like(variable, built, plan, any_implementation=any_implementation)
    if variable.kind == "parameter" and variable.name in plan.parameters:
        memory = plan.parameters[variable.name].stored_on
        rows = rows[[variable.labels[row].stored_on == memory for row in rows.tolist()]]
    if variable.kind == "operator" and variable.availability is not None and variable.name in plan.operators:
        states, entry = variable.availability[rows], plan.operators[variable.name]
        in_form = FORM_STATES.get(entry.saved_as, -1)
        is_so = ((states == RECOMPUTED) == entry.recompute) & ((states == ON_HOST) == (entry.saved_on == HOST))
        rows = rows[is_so & (np.where(np.isin(states, [*FORM_OF]), states, -1) == in_form)]
    return rows


def completed(built: Built, rows: Mapping[int, Rows], mesh: Mesh) -> Rows:
    """(variables,) the cheapest labels among `rows`. Raises PlanMismatchError naming two choices that cannot meet."""
    narrow = narrowed(built, dict(rows), ()).problem
    start = np.zeros(len(built.variables), dtype=np.int64)
    found = solve(narrow, warm_start=start).assignment
    labels = np.array([rows[index][label] for index, label in enumerate(found.tolist())], dtype=np.int64)
    _check_allowed(built, labels, mesh)
    return labels


def _check_allowed(built: Built, labels: Rows, mesh: Mesh) -> None:
    chosen = labels.tolist()
    for edge in built.problem.edges:
        if is_forbidden(edge.costs[chosen[edge.source], chosen[edge.target]]):
            source, target = built.variables[edge.source], built.variables[edge.target]
            raise PlanMismatchError(
                f"{target.name} ({describe(target, chosen[edge.target], mesh)}) cannot read what {source.name} makes "
                f"({describe(source, chosen[edge.source], mesh)}): no redistribution leads from one to the other; "
                "change one of the two"
            )


def described(variable: Variable, mesh: Mesh, *, with_state: bool = True) -> list[str]:
    """`describe` of every label."""
    return [describe(variable, label, mesh, with_state=with_state) for label in range(len(variable.costs))]


def _no_choice(variable: Variable, plan: Plan) -> PlanMismatchError:
    """Why what a plan says of a decision is none of its choices."""
    if variable.kind == "operator":
        OperatorPlans(plan).of(variable.node)  # raises with its own reason where the entry breaks the operator's rule
        entry = plan.operators[variable.name]
        said = f"{axes_at_work(entry, plan.mesh)}{', computed again in backward' * entry.recompute}"
    elif variable.kind == "parameter":
        said = parameter_in_words(plan.parameters[variable.name], plan.mesh)
    else:
        said = "its layout"
    known = list(dict.fromkeys(described(variable, plan.mesh)))
    more = f" and {len(known) - SHOWN_CHOICES} more" if len(known) > SHOWN_CHOICES else ""
    mesh = ", ".join(f"{name}={size}" for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    return PlanMismatchError(
        f"{variable.name}: {said} is no choice on the mesh {mesh}{_on_axis(variable, plan)}; it can be "
        f"{'; '.join(known[:SHOWN_CHOICES])}{more}"
    )


def _on_axis(variable: Variable, plan: Plan) -> str:
    """The first axis on which no choice says what the plan says, if a single one is to blame."""
    for axis, name in enumerate(plan.mesh.axis_names):
        said, known = _entries(variable, plan, axis)
        if said not in known:
            return f": on {name} no choice has {said}{_misfit(variable, plan, axis)}"
    return ": each axis by itself can lie so, but not these together"


def _misfit(variable: Variable, plan: Plan, axis: int) -> str:
    """What about the shape of a parameter keeps an axis from cutting it as the plan says, if anything."""
    if variable.kind != "parameter":
        return ""
    shape, size, entry = shape_of(variable.node), plan.mesh.shape[axis], plan.parameters[variable.name]
    for placement in (entry.stored[axis], entry.used[axis]):
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            return f", since its shape {shape} has no dim {placement.dim}"
        if isinstance(placement, Shard) and shape[placement.dim] % (placement.split * size):
            parts = f"{placement.split} parts of {size} blocks" if placement.split > 1 else f"{size} blocks"
            return f", since {shape[placement.dim]} does not divide into {parts}"
    return ""


def _entries(variable: Variable, plan: Plan, axis: int) -> tuple[str, Sequence[str]]:
    """(what the plan says on an axis, what the labels of a variable say there)."""
    if variable.kind == "parameter":
        entry = plan.parameters[variable.name]
        said = f"{entry.stored[axis]} used as {entry.used[axis]}"
        return said, [f"{label.stored[axis]} used as {label.used[axis]}" for label in variable.labels]
    if variable.strategies is not None:
        return str(plan.operators[variable.name].axes[axis]), [str(axes[axis]) for axes in variable.strategies.axes]
    return "", [""]
