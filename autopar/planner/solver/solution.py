"""The answer: an assignment, a lower bound, and a certificate that somebody else can check.

A certificate is a *proof log*: exact steps that shrink the problem, then messages that bound what is left.
`kind` says how far it reaches.

- `messages`: the log ends in messages on a shrunken problem; replaying it recomputes `proven_bound`.
- `elimination`: the log ends with every node eliminated; replaying it recomputes the optimum.
- `solver`: the log proves `proven_bound`, but `Solution.lower_bound` was raised above it by HiGHS' branch and
  bound (and, with memory rows, by labels removed against its incumbent). That last stretch is not rechecked;
  it is as good as HiGHS.

`certificate.check_certificate` replays the log with its own code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from autopar.planner.solver.labelling import Floats, Integers, Problem, evaluate

Warmth = dict[tuple[int, int], tuple[Integers, Floats, Integers, Floats]]
"""Messages by edge: (u, v) -> labels of u, messages into u, labels of v, messages into v (`warm_messages`)."""


class Status(Enum):
    """How a solve ended: within `gap`, above it, nothing fits, or stopped."""

    OPTIMAL = "optimal"
    GAP = "gap"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dominate:
    """Labels of `node` outside `kept` (original labels) are each dominated by a kept one."""

    node: int
    kept: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Eliminate:
    """`node` is minimised out of everything that touches it."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """By these messages, labels of a node outside `kept[node]` cost at least `cutoff` seconds in total."""

    messages: Floats
    cutoff: float
    kept: Mapping[int, Integers]


Step = Dominate | Eliminate | Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A replayable proof that every assignment within the budgets costs at least `proven_bound` seconds.

    `multipliers`: seconds per byte of every memory row, >= 0. `ceiling`: costs are cut to this many seconds
    before the proof (it can only lower the bound). `messages`: for the edges (u < v) left after `steps`,
    sorted, the message into u, then into v.
    """

    kind: str
    proven_bound: float
    ceiling: float
    multipliers: tuple[float, ...] = ()
    steps: tuple[Step, ...] = ()
    messages: Floats

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, fit for JSON."""
        return {
            "kind": self.kind,
            "proven_bound": self.proven_bound,
            "ceiling": self.ceiling,
            "multipliers": list(self.multipliers),
            "steps": [_step_to_list(step) for step in self.steps],
            "messages": self.messages.tolist(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Certificate:
        """Inverse of `to_dict`."""
        return Certificate(
            kind=data["kind"],
            proven_bound=data["proven_bound"],
            ceiling=data["ceiling"],
            multipliers=tuple(data["multipliers"]),
            steps=tuple(_step_from_list(step) for step in data["steps"]),
            messages=np.array(data["messages"], dtype=np.float64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best assignment found and its bound; `gap` = (objective - lower_bound) / |objective|.

    `messages` may start a similar solve (`solve(warm_messages=...)`); no part of the proof.
    """

    assignment: Integers
    objective: float
    lower_bound: float
    gap: float
    status: Status
    certificate: Certificate
    statistics: dict[str, float | int | str]
    messages: Warmth = field(default_factory=dict)


def relative_gap(objective: float, lower_bound: float) -> float:
    """Return how far the bound may lie below the objective, relative to the objective, at least 0."""
    return max(objective - lower_bound, 0.0) / max(abs(objective), 1e-300)


def solution_of(problem: Problem, labels: Integers, lower_bound: float | None = None) -> Solution:
    """Labels that nobody searched, as a solution: proven is what is given, or nothing."""
    objective, _ = evaluate(problem, labels)
    bound = 0.0 if lower_bound is None else lower_bound
    certificate = Certificate(kind="none", proven_bound=bound, ceiling=np.inf, messages=np.zeros(0))
    return Solution(
        assignment=labels,
        objective=objective,
        lower_bound=bound,
        gap=relative_gap(objective, bound),
        status=Status.GAP,
        certificate=certificate,
        statistics={},
    )


def _step_to_list(step: Step) -> list[Any]:
    match step:
        case Eliminate():
            return ["eliminate", step.node]
        case Dominate():
            return ["dominate", step.node, step.kept.tolist()]
        case Fix():
            kept = [[node, labels.tolist()] for node, labels in step.kept.items()]
            return ["fix", step.messages.tolist(), step.cutoff, kept]


def _step_from_list(data: Sequence[Any]) -> Step:
    match data:
        case ["eliminate", node]:
            return Eliminate(node=node)
        case ["dominate", node, kept]:
            return Dominate(node=node, kept=np.array(kept, dtype=np.int64))
        case ["fix", messages, cutoff, kept]:
            labels = {node: np.array(values, dtype=np.int64) for node, values in kept}
            return Fix(messages=np.array(messages, dtype=np.float64), cutoff=cutoff, kept=labels)
    raise ValueError(f"unknown certificate step {data[0]!r}: expected eliminate, dominate or fix")
