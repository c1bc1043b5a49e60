"""The page of a whole plan: what it is and what it does in three lines, the known plans beside it, its layouts.

    ZeRO-3 over 64 devices: 989 ms a step, 8,300 tokens/s per GPU, 41 % of peak, 66.5 GiB of 71.5 GiB
    0.6 % faster than HSDP, the best of 4 known plans; proven optimal on this mesh

`Plan.summary()`, `repr(plan)`, the command line's tables and the report read the same lines.
"""

from __future__ import annotations

from autopar.layouts.placement import Mesh, Shard
from autopar.plans.expert_lines import expert_lines
from autopar.plans.parallelism import parallelism
from autopar.plans.plan_reasons import ladder_in_words, next_best, what_binds
from autopar.plans.plan_text import (
    LAYOUT_LEGEND,
    ROUNDING,
    ZIGZAG,
    align,
    format_bytes,
    format_count,
    format_mesh,
    format_placements,
    format_seconds,
    without_numbers,
)
from autopar.plans.plan_value import Baseline, ParameterPlan, PlanValue, Prediction
from autopar.plans.step_rates import StepRates, step_rates

LARGEST_GROUPS = 40
"""A summary lists at most this many groups of parameters; the file has them all."""
SCREEN_GROUPS = 8
"""And its `repr` the most frequent of them."""
FREE_AXES = ("outermost", "outer", "middle", "inner")
"""Axes that the search was free to use, outermost first."""


def headline(plan: PlanValue) -> str:
    """What the plan is, how fast and how full, in one line."""
    predicted, rates = plan.predicted, step_rates(plan)
    said = [f"{format_seconds(predicted.step_seconds)} a step"]
    rate, peak = rates.per_second(predicted.step_seconds), rates.of_peak(predicted.step_seconds)
    if rate is not None:
        each = "" if plan.num_ranks == 1 else f" per {rates.device}"
        said.append(f"{format_count(rate / plan.num_ranks)} {rates.unit}/s{each}")
    if peak is not None:
        said.append(f"{format_share(peak)} of peak")
    limit = plan.question.get("memory_limit_bytes")
    held, allowed = format_bytes(predicted.peak_bytes), format_bytes(limit) if isinstance(limit, int | float) else ""
    if allowed:
        held = f"{held.removesuffix(allowed[allowed.index(' ') :])} of {allowed}"
    return f"{parallelism(plan)}: {', '.join(said)}, {held}"


def beside_known_plans(plan: PlanValue) -> str:
    """How the plan compares with the best known one, and how far from the optimum it can be."""
    proven = gap_meaning(plan)
    priced = [known for known in plan.baselines if known.predicted is not None]
    if not plan.baselines:
        return proven
    best = min(priced, key=lambda known: known.predicted.step_seconds if known.predicted else 0.0, default=None)
    late = sum(known.is_out_of_time for known in plan.baselines)
    if late:
        proven = f"{late} more were not priced, the time was over; {proven}" if priced else proven
    if best is None or best.predicted is None:
        what = "was priced, the time was over" if late else "runs"
        return f"none of {len(plan.baselines)} known plans {what}; {proven}"
    faster = best.predicted.step_seconds / plan.predicted.step_seconds - 1.0 if plan.predicted.step_seconds else 0.0
    known = f"{best.name}, the best of {len(plan.baselines) - late} known plans"
    if abs(faster) < LEAST_FASTER:
        return f"as fast as {known}; {proven}"
    if faster >= 1.0:
        return f"{1.0 + faster:.1f} times as fast as {known}; {proven}"
    return f"{format_share(abs(faster))} {'faster' if faster > 0 else 'slower'} than {known}; {proven}"


LEAST_FASTER = 5e-4
"""Relative difference below which two steps are called equally fast."""


def gap_meaning(plan: PlanValue) -> str:
    """What the gap belongs to; the bound over all meshes is weaker than that of the chosen one."""
    meaning = "proven optimal" if plan.gap <= ROUNDING else f"at most {plan.gap:.2%} from the optimum"
    over_all = plan.statistics.get("gap_over_all_meshes")
    known = isinstance(over_all, int | float) and over_all > max(plan.gap, ROUNDING)
    return f"{meaning} on this mesh" + (f", at most {over_all:.1%} from it over all meshes" if known else "")


def format_share(share: float) -> str:
    """ "41 %"; "0.6 %" below ten."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def plan_columns(plan: PlanValue) -> tuple[str, ...]:
    """Heads of a table of plans. step: predicted seconds; tokens/s (or samples/s): of all devices; MFU: the model's
    FLOPs as a share of the peak; memory: predicted peak per device; cost: what the search made small."""
    return ("plan", "mesh", "step", f"{step_rates(plan).unit}/s", "MFU", "memory", "cost")


def plan_row(name: str, plan: PlanValue) -> tuple[str, ...]:
    """A plan as one row of `plan_columns`."""
    groups = plan.staged.groups
    shapes = " + ".join("x".join(map(str, group.shape)) for group in groups)
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    mesh = f"pp={shapes}" if groups else format_mesh(sizes)
    return (name, mesh, *_figures(plan.predicted, step_rates(plan)), format_seconds(plan.objective_seconds))


def plan_rows(plan: PlanValue) -> list[tuple[str, ...]]:
    """The chosen plan and its baselines, one row of `plan_columns` each."""
    rates = step_rates(plan)
    return [plan_row("chosen", plan), *(_baseline_row(baseline, rates) for baseline in plan.baselines)]


def _figures(predicted: Prediction, rates: StepRates) -> tuple[str, str, str, str]:
    rate, share = rates.per_second(predicted.step_seconds), rates.of_peak(predicted.step_seconds)
    return (
        format_seconds(predicted.step_seconds),
        "-" if rate is None else format_count(rate),
        "-" if share is None else format_share(share),
        format_bytes(predicted.peak_bytes),
    )


def _baseline_row(baseline: Baseline, rates: StepRates) -> tuple[str, ...]:
    name = (baseline.name, format_mesh(baseline.dims))
    cost = format_seconds(baseline.objective_seconds)
    if baseline.predicted is None:
        impossible = baseline.error is not None and not baseline.is_out_of_time
        return (*name, "does not run" if impossible else "not priced", "", "", "", cost)
    return (*name, *_figures(baseline.predicted, rates), cost)


def parameter_rows(plan: PlanValue) -> list[tuple[str, str, str]]:
    """(pattern, how many, layouts) of parameters whose names differ in numbers only and that share their layouts."""
    groups: dict[tuple[str, str], int] = {}
    for name, parameter in plan.parameters.items():
        key = (without_numbers(name), _parameter_layouts(parameter, plan.layout_mesh))
        groups[key] = groups.get(key, 0) + 1
    return [(pattern, str(count), layouts) for (pattern, layouts), count in groups.items()]


def _parameter_layouts(parameter: ParameterPlan, mesh: Mesh) -> str:
    stored, used = format_placements(parameter.stored, mesh), format_placements(parameter.used, mesh)
    if stored == used:
        return stored
    kept = "kept for backward" if parameter.keep_gathered else "gathered again in backward"
    return f"{stored} -> {used} ({kept})"


def legend(plan: PlanValue) -> str:
    """What the layouts of parameters mean, in one line or two."""
    lines = [LAYOUT_LEGEND]
    if any(parameter.stored != parameter.used for parameter in plan.parameters.values()):
        lines[0] += "; R -> S(0): stored as the first, read as the second"
    names, sizes = plan.layout_mesh.axis_names, plan.layout_mesh.shape
    if turned := [name for axis, name in enumerate(names) if _in_zigzag(plan, axis)]:
        lines.append(f"{', '.join(turned)}: the sequence is {ZIGZAG}")
    free = [name for name, size in zip(names, sizes, strict=True) if name in FREE_AXES and size > 1]
    if free:
        inner = f"; ranks beside each other lie along {free[-1]}" if len(free) > 1 else ""
        lines.append(f"{', '.join(free)}: axes of the mesh that the search was free to use{inner}")
    return "\n".join(lines)


def _in_zigzag(plan: PlanValue, axis: int) -> bool:
    """Whether operators of a plan, or of its rank groups, read something that an axis splits in zigzag order."""
    everywhere = (plan.operators, *(group.operators for group in plan.staged.groups))
    read = (layout[axis] for operators in everywhere for each in operators.values() for layout in each.inputs)
    return any(isinstance(placed, Shard) and placed.zigzag for placed in read)


def facts(plan: PlanValue, verbose: bool = False) -> list[str]:
    """Lines that belong under the table: cluster, what binds, the next best plan, largest memory, why baselines
    do not run, where placed experts lie, uncovered operators, discovered rules, notes. verbose: what the search
    counted, too."""
    gap = f"gap {plan.gap:.1e}" if plan.gap > ROUNDING else "gap 0"
    lines = [
        f"cluster {plan.cluster}, priced by {plan.profile}",
        "step and memory (per device) are the simulator's; cost is what the search made small: no plan on this mesh "
        f"costs less than {format_seconds(plan.bound_seconds)} ({gap})",
    ]
    if plan.micro_batches > 1:
        once = "; gathers once per step: parameters and gradients are whole till its end" * plan.gather_once
        lines.append(
            f"{plan.micro_batches} micro-batches: forward and backward of each in turn, gradients added up{once}"
        )
    if plan.kernels:
        lines.append(f"kernels of ours in the place of groups: {', '.join(plan.kernels)}; else {plan.kernel_backend}'s")
    prediction = plan.predicted
    lines += [line for line in (what_binds(plan), ladder_in_words(plan), next_best(plan)) if line]
    if prediction.bytes_by_kind:
        parts = sorted(prediction.bytes_by_kind.items(), key=lambda item: -item[1])
        lines.append("memory " + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in parts))
    lines.extend(f"{known.name} does not run: {known.error}" for known in plan.baselines if known.error)
    lines.extend(expert_lines(plan))
    if verbose:
        lines.extend(f"{name}: {_number(value)}" for name, value in plan.statistics.items())
    for operator, seconds in plan.uncovered.items():
        lines.append(f"no rule for {operator}: replicated, +{format_seconds(seconds)} per step")
    lines.extend(f"rule discovered for {call}: {rule}" for call, rule in plan.discovered.items() if rule is not None)
    return [*lines, *plan.notes]


def _number(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def one_screen(plan: PlanValue) -> str:
    """What `repr` shows: the lines of the plan, the known plans beside it, and the most frequent layouts."""
    groups = sorted(parameter_rows(plan), key=lambda row: -int(row[1]))
    lines = [f"Plan: {headline(plan)}", beside_known_plans(plan), "", align(plan_columns(plan), plan_rows(plan)), ""]
    lines.append(align(("parameters", "count", "layout"), groups[:SCREEN_GROUPS]))
    more = len(groups) - SCREEN_GROUPS
    rest = f"... and {more} more groups; " if more > 0 else ""
    return "\n".join([*lines, f"{rest}plan.summary() says more, plan.explain(name) why"])


def summary(plan: PlanValue, verbose: bool = False) -> str:
    """The plan on one page: what it is, the known plans beside it, then the layouts of its parameters."""
    rows = parameter_rows(plan)
    lines = [headline(plan), beside_known_plans(plan), "", align(plan_columns(plan), plan_rows(plan)), ""]
    lines += [*facts(plan, verbose), "", align(("parameters", "count", "layout"), rows[:LARGEST_GROUPS])]
    if len(rows) > LARGEST_GROUPS:
        lines.append(f"... and {len(rows) - LARGEST_GROUPS} more groups")
    return "\n".join([*lines, legend(plan)])
