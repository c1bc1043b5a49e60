"""Where two plans part, for a person: parameters with equal layers as one, and how many operators follow.

    parameters                        before                  after
    --------------------------------  ----------------------  --------------------
    model.layers.*.mlp.up_proj.weight dp_shard: S(0)          dp_shard: S(1), tp: S(0)
    ...
    4396 of 4415 operators are split otherwise
    33 of 4415 operators are computed again in backward otherwise

`Plan.diff` has every line; `plan.explain(vs=other)` says what the differences cost.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.layouts.placement import Layout, Mesh
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_summary import LARGEST_GROUPS, parameter_rows
from autopar.plans.plan_text import align, format_placements
from autopar.plans.plan_value import OperatorPlan


def changed_lines(this: Plan, other: Plan, names: tuple[str, str]) -> list[str]:
    """The text of two plans' differences, empty where they are equal. names: of the two columns."""
    layouts = [_by_pattern(plan) for plan in (this, other)]
    patterns = list(dict.fromkeys([*layouts[0], *layouts[1]]))
    rows = [(name, *(table.get(name, "-") for table in layouts)) for name in patterns]
    rows = [row for row in rows if row[1] != row[2]]
    lines = align(("parameters", *names), rows[:LARGEST_GROUPS]).splitlines() if rows else []
    if len(rows) > LARGEST_GROUPS:
        lines.append(f"and {len(rows) - LARGEST_GROUPS} more groups")
    return lines + _operator_lines(this, other) + _step_lines(this, other, names)


def _by_pattern(plan: Plan) -> dict[str, str]:
    """ "layers.*.up.weight" -> "tp: S(0)", or "30 x R; 2 x tp: S(0)" where equal names lie differently."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for pattern, count, layouts in parameter_rows(plan):
        found[pattern].append((count, layouts))
    return {
        pattern: groups[0][1] if len(groups) == 1 else "; ".join(f"{count} x {text}" for count, text in groups)
        for pattern, groups in found.items()
    }


def _operator_lines(this: Plan, other: Plan) -> list[str]:
    common = [name for name in this.operators if name in other.operators]
    pairs = [(this.operators[name], other.operators[name]) for name in common]
    split = sum(_layouts(a, this.layout_mesh) != _layouts(b, other.layout_mesh) for a, b in pairs)
    again = sum(a.recompute != b.recompute for a, b in pairs)
    said = ((split, "are split"), (again, "are computed again in backward"))
    lines = [f"{count} of {len(common)} operators {what} otherwise" for count, what in said if count]
    alone = len(this.operators) + len(other.operators) - 2 * len(common)
    return [*lines, f"{alone} operators are in one plan only"] if alone else lines


def _layouts(operator: OperatorPlan, mesh: Mesh) -> list[str]:
    layouts: tuple[Layout, ...] = (*operator.inputs, *operator.outputs)
    return [format_placements(layout, mesh) for layout in layouts]


def _stages(plan: Plan) -> str:
    """ "layers.0 .. layers.1; layers.2 .. head"."""
    return "; ".join(stage.name for stage in plan.stages) if plan.in_stages else "-"


def _step_lines(this: Plan, other: Plan, names: tuple[str, str]) -> list[str]:
    """What belongs to the step as a whole: micro-batches, schedule, stages."""
    facts = [
        ("micro-batches", *(str(plan.micro_batches) for plan in (this, other))),
        ("schedule", *(plan.staged.schedule if plan.in_stages else "-" for plan in (this, other))),
        ("stages", *(_stages(plan) for plan in (this, other))),
    ]
    return [f"{what}: {names[0]} {a}, {names[1]} {b}" for what, a, b in facts if a != b]
