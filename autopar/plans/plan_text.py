"""A plan in words: units, layouts, the lines of `Plan.explain(name)`. The page of a whole plan: `plan_summary.py`.

Everything is computed from the plan alone, so a plan file explains itself where neither model nor planner is. Layers
that repeat are shown once: `layers.0.up.weight` and `layers.1.up.weight` with equal layouts are `layers.*.up.weight`.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from autopar.errors import ConfigurationError
from autopar.layouts.moves import Way
from autopar.layouts.placement import Layout, Mesh, Partial, Placement, Replicate, Shard, format_layout
from autopar.layouts.redistribution import RedistributionStep, steps_on
from autopar.plans.plan_value import (
    DEFAULT_IMPLEMENTATION,
    DEVICE,
    MASK,
    ROUNDED_BITS,
    WHOLE,
    OperatorPlan,
    ParameterPlan,
    PlanValue,
)

SAVED_AS = {MASK: "as a bit a value"} | {form: f"in {bits} bits a value" for form, bits in ROUNDED_BITS.items()}
"""Forms in words."""
ROUNDING = 1e-9
"""A relative gap below this is rounding of the sums: the plan is optimal at its prices."""
LAYOUT_LEGEND = "S(0): split along dim 0; R: whole on every device; P(sum): partial sums, not yet added up"
ZIGZAG = (
    "in zigzag order: rank 0 has the first and the last block, rank 1 the second and the last but one, ...: causal "
    "attention costs all ranks alike"
)
ZIGZAG_LEGEND = f"S(1, zigzag): dim 1 {ZIGZAG}"
"""Where a layout has such a placement."""
OTHERS = 4
"""Pipelines that an explanation lists beside the chosen one."""


def format_seconds(seconds: float | None) -> str:
    """Three significant digits with the unit that fits: "12.8 ms"."""
    if seconds is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def format_bytes(num_bytes: float | None) -> str:
    """Binary units: "38.2 GiB"."""
    if num_bytes is None:
        return "-"
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(num_bytes) >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Three significant digits with commas: "8,310", "0.52"."""
    return f"{round(count, 2 - math.floor(math.log10(count))):,.0f}" if count >= 100 else f"{count:.3g}"


def format_mesh(sizes: Mapping[str, int]) -> str:
    """Axes that split something: "dp_shard=2 tp=4"; "1 device" where none does."""
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "1 device"


def format_placements(layout: Layout, mesh: Mesh) -> str:
    """The placement on every axis that has a name and a size above one: "tp: S(0)"; "R" where nothing is split."""
    chosen = [
        f"{name}: {placement}"
        for name, size, placement in zip(mesh.axis_names, mesh.shape, layout, strict=True)
        if size > 1 and str(placement) != "R"
    ]
    return ", ".join(chosen) or "R"


def difference(this: PlanValue, other: PlanValue) -> str:
    """Unified diff of the choices of two plans, empty when they are equal."""
    return "\n".join(difflib.unified_diff(_choices(this), _choices(other), "this", "other", lineterm="", n=0))


def _choices(plan: PlanValue) -> list[str]:
    """One line per choice, in plan order, for `diff`."""
    lines = [f"mesh {name}={size}" for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)]
    lines.append(f"micro_batches {plan.micro_batches}{', gathers once' * plan.gather_once}")
    lines += [f"{kind} over {group} in symmetric memory" for kind, of in plan.symmetric_memory.items() for group in of]
    lines += [f"{module}: copies of experts {[*experts]}" for module, experts in plan.replicated_experts.items()]
    lines += [f"{module}: experts in the order {[*order]}" for module, order in plan.expert_order.items()]
    if plan.in_stages:
        lines.append(f"schedule {plan.staged.schedule}, {plan.staged.chunks} chunks {plan.staged.actions}")
        lines += [
            f"{stage.name} on {stage.rank_group} up to {stage.last_operator}{', gathers once' * stage.gather_once}"
            for stage in plan.staged.stages
        ]
        lines += [f"group {i}: {g}" for i, g in enumerate(plan.staged.groups)]
    lines += [f"{name}: {_parameter_line(parameter)}" for name, parameter in plan.parameters.items()]
    return lines + [f"{name}: {_operator_line(operator)}" for name, operator in plan.operators.items()]


def _parameter_line(parameter: ParameterPlan) -> str:
    """All that is chosen for a parameter; what is not as by default behind its layouts."""
    stored, used, gradient = _layouts((parameter.stored, parameter.used, parameter.gradient))
    line = f"stored {stored} used {used} gradient {gradient}"
    line += _shared((parameter.shared_forward,), (parameter.shared_backward,))
    return line + " kept" * parameter.keep_gathered + _elsewhere("stored", parameter.stored_on)


def _operator_line(operator: OperatorPlan) -> str:
    """All that is chosen for an operator; what is not as by default behind its layouts."""
    line = f"{operator.axes} {_layouts(operator.inputs)} -> {_layouts(operator.outputs)}"
    line += _shared(operator.shared_forward, operator.shared_backward)
    line += f" runs as {operator.implementation}" * (operator.implementation != DEFAULT_IMPLEMENTATION)
    line += " computed again" * operator.recompute
    line += f" and once more before {', '.join(operator.recompute_at)}" * bool(operator.recompute_at)
    line += _elsewhere("saved", operator.saved_on)
    return line + f" saved as {operator.saved_as}" * (operator.saved_as != WHOLE)


def _shared(forward: Sequence[Layout | None], backward: Sequence[Layout | None]) -> str:
    """The copies that all consumers of a phase share, where there are some."""
    phases = {"forward": forward, "backward": backward}
    found = {phase: layouts for phase, layouts in phases.items() if any(layout is not None for layout in layouts)}
    return "".join(f" shared in {phase} as {_layouts(layouts)}" for phase, layouts in found.items())


def _elsewhere(word: str, memory: str) -> str:
    return f" {word} on {memory}" * (memory != DEVICE)


def _layouts(layouts: Sequence[Layout | None]) -> list[list[str] | None]:
    return [None if layout is None else format_layout(layout) for layout in layouts]


def align(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    table = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def matching_names(plan: PlanValue, name: str) -> list[str]:
    """The parameter or operator `name`, what matches it as a glob (`layers.*.up.weight`), else everything inside the
    module `name`. Raises ConfigurationError with the nearest names where nothing does."""
    known = [*plan.parameters, *plan.operators]
    if name in plan.parameters or name in plan.operators:
        return [name]
    found = fnmatch.filter(known, name) or [other for other in known if other.startswith((f"{name}.", f"{name}/"))]
    if not found:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
        raise ConfigurationError(f"the plan has no {name!r}; nearest: {', '.join(near) or 'nothing'}")
    return found


def without_numbers(name: str) -> str:
    """ "layers.0.up.weight" -> "layers.*.up.weight": equal for the layers that repeat."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def layout_lines(plan: PlanValue, name: str) -> tuple[str, ...]:
    """How a parameter or operator lies, with what is redistributed by which collectives."""
    if name in plan.parameters:
        return (f"parameter {name}", *_explain_parameter(plan.parameters[name], plan.layout_mesh))
    return (f"operator {name}", *_explain_operator(plan.operators[name], plan.layout_mesh))


def why_no_runner_up(plan: PlanValue, name: str) -> list[str]:
    """What to say of a choice of which the plan itself names no other."""
    if plan.in_stages and plan.alternatives:
        return _other_pipelines(plan)
    if not plan.explanations:
        return ["no runner-up: the plan lists no other choices, so no search wrote it; its model could tell"]
    if name not in plan.explanations:
        return ["there is no other choice"]
    return ["no other choice while all else stays: neighbours would have to follow; its model tells what that costs"]


def _other_pipelines(plan: PlanValue) -> list[str]:
    """What else the search compared: with stages, layouts are compared a sub-mesh at a time."""
    lines = [f"the layout of the best plan on its stage's sub-mesh; as a whole {_step(plan.objective_seconds)}"]
    for other in plan.alternatives[:OTHERS]:
        if other.objective_seconds is not None:
            lines.append(f"instead {other.name}: {_step(other.objective_seconds)}")
        elif other.bound_seconds is not None:
            lines.append(f"instead {other.name}: at least {_step(other.bound_seconds)}")
        else:
            lines.append(f"instead {other.name}: {other.error}")
    more = len(plan.alternatives) - OTHERS
    return [*lines, f"and {more} more in plan.alternatives"] if more > 0 else lines


def _step(seconds: float) -> str:
    return f"{format_seconds(seconds)} per step"


def runners_up(plan: PlanValue, name: str) -> list[str]:
    """What else a parameter or operator could be, each with what it adds to the step: "instead R: +1.2 ms per step"."""
    return [
        f"instead {description}: {'+' if delta >= 0 else '-'}{format_seconds(abs(delta))} per step"
        for description, delta in plan.explanations.get(name, ())
    ]


def _explain_parameter(parameter: ParameterPlan, mesh: Mesh) -> list[str]:
    lines = [
        f"  stored    {format_placements(parameter.stored, mesh)}",
        f"  used as   {format_placements(parameter.used, mesh)}{_steps(parameter.stored, parameter.used, mesh)}",
        f"  gradient  {format_placements(parameter.gradient, mesh)}"
        f"{_steps(parameter.gradient, parameter.stored, mesh)}",
    ]
    if parameter.stored != parameter.used:
        again = "kept" if parameter.keep_gathered else "gathered again in backward"
        lines.append(f"  the gathered weight is {again}")
    if parameter.stored_on != DEVICE:
        lines.append(f"  lies on the {parameter.stored_on} between its uses, with gradient and optimizer state")
    for phase, shared in (("forward", parameter.shared_forward), ("backward", parameter.shared_backward)):
        if shared is not None:
            steps = _steps(parameter.used, shared, mesh)
            lines.append(f"  shared by the consumers in {phase} as {format_placements(shared, mesh)}{steps}")
    return lines


def axes_at_work(operator: OperatorPlan, mesh: Mesh) -> str:
    """What every axis of the mesh splits of an operator, see `axes_in_words`, and as what it runs."""
    return in_words(axes_in_words(operator.axes, operator.outputs, mesh), operator.implementation)


def in_words(axes: str, implementation: str) -> str:
    """What the axes do, and as what the operator runs where that is not as it was captured."""
    return axes if implementation == DEFAULT_IMPLEMENTATION else f"{axes}; runs as {implementation}"


def axes_in_words(axes: Sequence[str | None], outputs: Sequence[Layout | None], mesh: Mesh) -> str:
    """What every axis splits of an operator with these outputs: "dp_shard splits m (dim 0); tp splits k (partial
    sums)"; "whole on every device" where none does."""
    roles = [
        f"{axis} {_role(axes[index], _placed(outputs, index))}"
        for index, (axis, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True))
        if axes[index] is not None and size > 1
    ]
    return "; ".join(roles) or "whole on every device"


def _role(name: str | None, placed: Placement) -> str:
    """What an axis does that picks `name` of an operator's rule, and leaves an output placed so."""
    if name == "partial":
        return "passes partial sums on"
    if isinstance(placed, Partial):
        return f"splits {name} (partial {'sums' if placed.op == 'sum' else placed.op})"
    if not isinstance(placed, Shard):
        return f"splits {name}"
    order = ", zigzag" if placed.zigzag else ""
    named = name != f"d{placed.dim}"
    return f"splits {name} (dim {placed.dim}{order})" if named else f"splits dim {placed.dim}{order}"


def _placed(outputs: Sequence[Layout | None], axis: int) -> Placement:
    """What the first output that an axis divides is on that axis."""
    divided = (layout[axis] for layout in outputs if layout is not None and layout[axis] != Replicate())
    return next(divided, Replicate())


def parameter_in_words(parameter: ParameterPlan, mesh: Mesh) -> str:
    """ "stored dp_shard: S(0), used R"; "stored and used tp: S(1)"."""
    stored, used = format_placements(parameter.stored, mesh), format_placements(parameter.used, mesh)
    kept = ", kept for backward" if parameter.keep_gathered else ""
    kept += f", on the {parameter.stored_on}" * (parameter.stored_on != DEVICE)
    return f"stored and used {stored}{kept}" if stored == used else f"stored {stored}, used {used}{kept}"


def _explain_operator(operator: OperatorPlan, mesh: Mesh) -> list[str]:
    lines = [f"  {axes_at_work(operator, mesh)}"]
    lines += [f"  operand {i}  {format_placements(layout, mesh)}" for i, layout in enumerate(operator.inputs)]
    for index, layout in enumerate(operator.outputs):
        lines.append(f"  output {index}   {format_placements(layout, mesh)}")
        for phase, shared in (("forward", operator.shared_forward), ("backward", operator.shared_backward)):
            target = shared[index] if index < len(shared) else None
            if target is not None:
                lines.append(f"    for {phase} {format_placements(target, mesh)}{_steps(layout, target, mesh)}")
    if operator.recompute:
        lines.append("  computed again in backward")
    if operator.saved_on != DEVICE:
        lines.append(f"  waits for backward on the {operator.saved_on}")
    if operator.saved_as != WHOLE:
        lines.append(f"  saved for backward {SAVED_AS[operator.saved_as]}")
    return lines


def _steps(source: Layout, target: Layout, mesh: Mesh) -> str:
    """The collectives between two layouts: "  by all_gather(dp_shard)"; empty where there are none.

    A plan has no shapes, so both ways are named where an axis waits in another dim if a large tensor has one that it
    divides. Blocks are taken as even; the plan's notes name the uneven ones.
    """
    dims = [placement.dim for placement in (*source, *target) if isinstance(placement, Shard)]
    spare = Shard(max(dims, default=-1) + 1)
    straight = _collectives(steps_on(Way.STRAIGHT, source, target), mesh)
    waiting = _collectives(steps_on(Way.WAITING, source, target, spare=spare), mesh)
    if straight == waiting:
        return f"  by {straight}" if straight else ""
    return f"  by {straight}; by {waiting} where another dim of a large tensor has room"


def _collectives(steps: Sequence[RedistributionStep], mesh: Mesh) -> str:
    return ", ".join(
        f"{step.kind}({'+'.join(mesh.axis_names[axis] for axis in step.axes)})"
        for step in steps
        if math.prod(mesh.shape[axis] for axis in step.axes) > 1
    )
