"""Comparison: where two plans of one program part, and what each difference costs.

    plan less ddp                    by term
    layers.*.up.weight x32           all_gather over dp_shard +1.2 ms, all_reduce over dp_replicate -3.4 ms

Both plans are priced by the same cluster, each on its own mesh, with all communication counted. Every second belongs to
one parameter, operator or output, so the differences add up to the difference of the two sums of costs. What runs
beside computation makes a step shorter than that sum: the predicted steps are stated beside it. Where one of the two
has stages, both steps are played instead, and a second is one of an average device (`played_costs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from autopar.errors import ConfigurationError, InfeasibleError
from autopar.explain.answers import Comparison, Difference, Term
from autopar.explain.cost_terms import cost_terms
from autopar.explain.played_costs import SCHEDULE, played_costs, schedule_in_words
from autopar.explain.recovered import query_of
from autopar.explain.source import Source
from autopar.layouts.placement import Mesh
from autopar.planner.meshes.baseline_plans import baseline_plans
from autopar.planner.one_mesh.recovered_problem import recover
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import axes_at_work, format_bytes, format_placements, without_numbers
from autopar.request import Request

SHORT_NAMES = {"ddp": "DDP", "fsdp": "ZeRO-3", "zero3": "ZeRO-3", "zero-3": "ZeRO-3", "hsdp": "HSDP"}
NO_LIMIT = 1e18
"""Bytes of a limit that nothing meets: a baseline that does not fit is still compared."""


@runtime_checkable
class HasSource(Protocol):
    """The origin of a plan that was made in this process."""

    @property
    def source(self) -> Source:
        """What the plan was made from."""


def compare_plans(source: Source, plan: Plan, other: Plan | str) -> Comparison:
    """A plan beside another one of the same program, or beside a baseline by name ("ddp", "fsdp", "tp", "hsdp").

    Where one has stages, both are played (`played_costs.py`). Raises ConfigurationError for an unknown name and for a
    plan of another program.
    """
    name, notes, asked = "the other", list[str](), source.request
    if isinstance(other, str):
        name, (other, notes, asked) = other, _known(source, plan, other)
    elif isinstance(other.origin, HasSource):
        asked = other.origin.source.request
    is_played = plan.in_stages or other.in_stages
    if not is_played and other.micro_batches == plan.micro_batches and other.fingerprint != plan.fingerprint:
        raise ConfigurationError("the two plans are of different programs: compare plans of one model and one batch")
    sums, costs = [], []
    for each, request in ((plan, source.request), (other, asked)):
        if is_played:
            played = played_costs(source, each, request)
            sums.append(played.step_seconds)
            costs.append(_by_pattern(played.terms))
            continue
        counted = replace(each, hidden_share=0.0)
        recovered = recover(query_of(source, counted, request), counted)
        sums.append(recovered.objective)
        costs.append(_by_pattern(cost_terms(recovered)))
    chosen = [_choices(each) for each in (plan, other)]
    if is_played:
        for each, choices in zip((plan, other), chosen, strict=True):
            choices[SCHEDULE] = [schedule_in_words(each)]
    differences = [
        _difference(pattern, costs[0].get(pattern, {}), costs[1].get(pattern, {}), chosen)
        for pattern in dict.fromkeys([*costs[0], *costs[1]])
    ]
    parted = [d for d in differences if d.choices is not None or any(d.seconds.values())]
    return Comparison(
        names=("this plan", name),
        objective_seconds=(sums[0], sums[1]),
        step_seconds=(plan.predicted.step_seconds, other.predicted.step_seconds),
        peak_bytes=(plan.predicted.peak_bytes, other.predicted.peak_bytes),
        differences=tuple(sorted(parted, key=lambda d: (-abs(d.total), d.pattern))),
        notes=tuple(notes),
        is_played=is_played,
    )


def _known(source: Source, plan: Plan, name: str) -> tuple[Plan, list[str], Request]:
    """A baseline by name, completed by the planner, and what was asked; one that does not fit too, with a note."""
    dims = _dims_of(source, plan, name)
    free = replace(source.request, constraints=None, recompute=None, micro_batches=None, schedule=None, dims=None,
                   cp=None, ep=None, replicated_experts=None, expert_capacity=None)  # fmt: skip
    free = replace(free, dims=dims, mesh=None, with_baselines=False, cache_dir=None, warm_start=None, mode="fast")
    try:
        return source.plan(free), [], free
    except InfeasibleError:
        found = source.plan(replace(free, memory_limit=NO_LIMIT))
        return found, [f"{name} does not fit: it needs {format_bytes(found.predicted.peak_bytes)} per device"], free


def _dims_of(source: Source, plan: Plan, name: str) -> dict[str, int]:
    known = baseline_plans(source.request.cluster)
    if name.lower() == "tp":
        return {"tp": plan.num_ranks}
    wanted = SHORT_NAMES.get(name.lower(), name)
    for title, dims in known.items():
        if title.lower() == wanted.lower():
            return dims
    raise ConfigurationError(
        f"vs={name!r}: write a plan, or one of {', '.join([*SHORT_NAMES, 'tp', *known])} (a cluster of one device or "
        "one node has fewer)"
    )


def _by_pattern(terms: Iterable[Term]) -> dict[str, dict[str, list[float]]]:
    """Names without their numbers -> label of the term -> seconds."""
    found: dict[str, dict[str, list[float]]] = {}
    for term in terms:
        found.setdefault(without_numbers(term.name), {}).setdefault(term.label, []).append(term.seconds)
    return found


def _difference(
    pattern: str,
    this: Mapping[str, Sequence[float]],
    other: Mapping[str, Sequence[float]],
    chosen: Sequence[Mapping[str, list[str]]],
) -> Difference:
    seconds = {
        label: math.fsum(this.get(label, ())) - math.fsum(other.get(label, ()))
        for label in dict.fromkeys([*this, *other])
    }
    words = [sorted(set(each.get(pattern, ["-"]))) for each in chosen]
    texts = (" / ".join(words[0]), " / ".join(words[1]))
    return Difference(
        pattern=pattern,
        count=max(len(chosen[0].get(pattern, ())), 1),
        seconds={label: value for label, value in seconds.items() if value},
        choices=texts if texts[0] != texts[1] else None,
    )


def _choices(plan: Plan) -> dict[str, list[str]]:
    """Names without their numbers -> the choices of a plan in words."""
    found: dict[str, list[str]] = {}
    mesh: Mesh = plan.layout_mesh
    for name, parameter in plan.parameters.items():
        stored, used = (format_placements(layout, mesh) for layout in (parameter.stored, parameter.used))
        kept = ", kept" if parameter.keep_gathered else ""
        found.setdefault(without_numbers(name), []).append(stored if stored == used else f"{stored} -> {used}{kept}")
    for name, operator in plan.operators.items():
        again = ", computed again" if operator.recompute else ""
        found.setdefault(without_numbers(name), []).append(axes_at_work(operator, mesh) + again)
    return found
