"""Completion: labels that obey an edit and keep what they can of a plan.

labels, notes = completed_beside(built, plan)       notes: what else had to change
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.errors import PlanMismatchError
from autopar.planner.one_mesh.recovered_problem import agreeing, completed
from autopar.planner.one_mesh.warm_start import Rows
from autopar.planner.problem.build import Built
from autopar.plans.parallel_plan import Plan


def merged(constraints: object, changes: Mapping[str, object]) -> object:
    """The constraints under which a plan was made, with those of the edit in place of equal ones."""
    return {**constraints, **changes} if isinstance(constraints, Mapping) else dict(changes)


def completed_beside(built: Built, plan: Plan) -> tuple[Rows, list[str]]:
    """Labels that keep what they can of the plan, and notes on what else had to change."""
    rows, changed = {}, set()
    for index, variable in enumerate(built.variables):
        same = agreeing(variable, built, plan)
        if not len(same):
            same = agreeing(variable, built, plan, any_implementation=True)  # an edit may name another
        if not len(same):
            changed.add(index)
        rows[index] = np.arange(len(variable.costs)) if variable.kind == "copy" or not len(same) else same
    try:
        return completed(built, rows, plan.mesh), []
    except PlanMismatchError as reason:
        moved = changed | {i for i, variable in enumerate(built.variables) if variable.kind == "copy"}
        near = {edge.target for edge in built.problem.edges if edge.source in moved}
        near |= {edge.source for edge in built.problem.edges if edge.target in moved}
        free = {index: np.arange(len(built.variables[index].costs)) for index in near}
        labels = completed(built, {**rows, **free}, plan.mesh)
        return labels, [f"edited by hand, and neighbours were chosen anew: {reason}"]
