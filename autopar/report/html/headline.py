"""What stands at the top of a report: the figures of the plan, its mesh over the links, and why not another plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_summary import gap_meaning
from autopar.plans.plan_text import ROUNDING, format_bytes, format_count, format_mesh, format_seconds
from autopar.plans.plan_value import Baseline
from autopar.plans.step_rates import step_rates
from autopar.report.html.step_shares import step_shares
from autopar.report.html.timeline import RecordedStep


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its name and what it means."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan that was not taken: its name and mesh, and why."""

    name: str
    mesh: str
    reason: str


def headline(plan: Plan, timeline: RecordedStep | None) -> list[Figure]:
    """Time, memory, communication, and what the plan's schedule is."""
    predicted, rates = plan.predicted, step_rates(plan)
    figures = [Figure("step", format_seconds(predicted.step_seconds), "predicted by the cost model")]
    if timeline is not None:
        figures.append(Figure("simulated", format_seconds(timeline.seconds), "the lowered program, action by action"))
    rate = rates.per_second(predicted.step_seconds)
    if rate is not None:
        each = "" if plan.num_ranks == 1 else f"{format_count(rate / plan.num_ranks)} per {rates.device}"
        figures.append(Figure(f"{rates.unit}/s", format_count(rate), each or "of one device"))
    used = _utilisation(plan)
    if used is not None:
        figures.append(used)
    figures.append(Figure("memory", format_bytes(predicted.peak_bytes), "peak of a device" + _limit(plan)))
    return [*figures, *_communication(plan, timeline), *_schedule(plan)]


def _communication(plan: Plan, timeline: RecordedStep | None) -> Iterator[Figure]:
    """Communication that nothing hides: as played, where the step was; the planner plays a pipeline by whole passes."""
    what = "communication that no computation hides"
    if timeline is None:
        seconds = plan.predicted.exposed_communication_seconds
        yield Figure("waiting", format_seconds(seconds), "sending between stages" if plan.in_stages else what)
        return
    shares = step_shares(timeline)
    most = ", of the rank that waits most" if plan.in_stages else ""
    yield Figure("waiting", format_seconds(shares.exposed_seconds), f"{what}{most}")
    if plan.in_stages:
        yield Figure("bubble", f"{shares.bubble:.1%}", "of the ranks' time: they neither compute nor communicate")


def _schedule(plan: Plan) -> Iterator[Figure]:
    if plan.in_stages:
        schedule = f"{plan.mesh.shape[0]} rank groups, {len(plan.stages)} stages"
        yield Figure("schedule", plan.staged.schedule, f"{schedule}, {plan.micro_batches} micro-batches")
    elif plan.micro_batches > 1:
        yield Figure("micro-batches", str(plan.micro_batches), "parts of the batch, one after the other")


def certificate(plan: Plan) -> list[Figure]:
    """What is proven of the plan, and at which prices."""
    tier, _, source = plan.profile.partition(": ")
    return [
        Figure("cost", format_seconds(plan.objective_seconds), "what the search made small: nothing in it overlaps"),
        Figure("lower bound", format_seconds(plan.bound_seconds), "no plan on this mesh costs less at these prices"),
        Figure("gap", "0" if plan.gap <= ROUNDING else f"{plan.gap:.2%}", gap_meaning(plan)),
        Figure("prices", tier, source or "where the seconds come from"),
    ]


def _utilisation(plan: Plan) -> Figure | None:
    """FLOPs of the model per second and device, beside the fastest product measured; None where no one counted."""
    rates = step_rates(plan)
    share = rates.of_peak(plan.predicted.step_seconds)
    if share is None or rates.peak is None:
        return None
    peak = rates.peak / plan.num_ranks
    fastest = f"{peak / 1e12:.3g} TFLOP/s, the fastest {rates.dtype} product measured"
    return Figure("utilisation (MFU)", f"{share:.1%}", f"{share * peak / 1e12:.3g} of {fastest}")


def _limit(plan: Plan) -> str:
    limit = plan.question.get("memory_limit_bytes")
    return f", of {format_bytes(float(limit))} allowed" if isinstance(limit, int | float) else ""


def why_not(plan: Plan) -> list[Refused]:
    """Baselines and other meshes, each with what speaks against it."""
    own = plan.predicted.step_seconds
    return [
        Refused(other.name, format_mesh(other.dims), _reason(other, plan, own))
        for other in (*plan.baselines, *plan.alternatives)
    ]


def _reason(other: Baseline, plan: Plan, own: float) -> str:
    if other.error is not None:
        return other.error
    if other.predicted is not None:
        step = other.predicted.step_seconds
        share = f"{step / own:.2f} x the step ({format_seconds(step)})" if own else format_seconds(step)
        return f"{share}, {format_bytes(other.predicted.peak_bytes)} a device"
    if other.objective_seconds is not None:
        return f"costs {format_seconds(other.objective_seconds)} against {format_seconds(plan.objective_seconds)}"
    if other.bound_seconds is not None:
        return f"cannot cost less than {format_seconds(other.bound_seconds)}"
    return "not priced"
