"""Bars of a report: the steps of the plan and its baselines side by side, and what fills the memory."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_reasons import idle_seconds
from autopar.plans.plan_text import format_bytes, format_mesh, format_seconds
from autopar.plans.plan_value import Prediction
from autopar.report.html.palette import PARTS


@dataclass(frozen=True, slots=True)
class Bar:
    """One plan; widths in percent of the longest step: computation, communication that nothing hides, and waiting for
    other stages. value: step and memory, or that it has none."""

    name: str
    mesh: str
    value: str
    compute_width: float
    exposed_width: float
    idle_width: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of memory at the peak; share in percent. colour: number of a part in the style sheet."""

    name: str
    num_bytes: float
    share: float
    colour: int


def plan_bars(plan: Plan) -> list[Bar]:
    """The chosen plan first, then the baselines; those without a price have an empty bar."""
    rows: list[tuple[str, str, Prediction | None]] = [
        ("chosen", format_mesh(dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))), plan.predicted)
    ]
    rows += [(b.name, format_mesh(b.dims), b.predicted) for b in plan.baselines]
    longest = max(predicted.step_seconds for _, _, predicted in rows if predicted is not None) or 1.0
    return [_bar(name, mesh, predicted, longest, index == 0) for index, (name, mesh, predicted) in enumerate(rows)]


def _bar(name: str, mesh: str, predicted: Prediction | None, longest: float, chosen: bool) -> Bar:
    if predicted is None:
        return Bar(name, mesh, "does not run here: see below", 0.0, 0.0, 0.0, chosen)
    step, exposed = predicted.step_seconds, predicted.exposed_communication_seconds
    idle = idle_seconds(predicted)
    value = f"{format_seconds(step)}, {format_bytes(predicted.peak_bytes)}"
    compute_width, exposed_width, idle_width = (100.0 * p / longest for p in (step - exposed - idle, exposed, idle))
    return Bar(name, mesh, value, compute_width, exposed_width, idle_width, chosen)


def memory_parts(plan: Plan) -> list[Part]:
    """Kinds of memory at the peak, largest first."""
    kinds = sorted(plan.predicted.bytes_by_kind.items(), key=lambda item: -item[1])
    total = sum(size for _, size in kinds) or 1.0
    return [Part(name, size, 100.0 * size / total, index % len(PARTS)) for index, (name, size) in enumerate(kinds)]
