"""Contenders: another kind of answer, which may spare a search the work that takes longest.

    work ahead        plain                                   a contender says
    finer meshes      16 s at least on two axes               7 s: they are left out
    fitting           1.1 s without a limit, and too large    infinity: not looked at, no estimate is better
    more parts        1.2 s in one part                       1.0 s: more parts must be faster

What is searched over is a `Candidates` (`mesh_search.py`). A contender has the same three sides: an estimate of its
best, its next refinement, which it does at most once and only where the estimate makes it worth the time, and what it
costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from autopar.layouts.placement import Mesh
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import Prediction

Work: TypeAlias = Literal["finer meshes", "fitting", "more parts"]
"""Meshes of more than two axes are solved; the best mesh is fitted into memory; the batch runs in more parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What is known of plans without stages. seconds: of a step; is_played: whether a plan that fits was played for so
    long, else it is a sum, whatever the memory limit; is_short: whether that sum is known to need more memory than
    there is; work_seconds: what devices compute in it, if nothing is computed twice (None: unknown); bounds: of the
    meshes that were solved, in seconds, whatever the memory limit."""

    seconds: float
    is_played: bool = False
    is_short: bool = False
    work_seconds: float | None = None
    bounds: Mapping[Mesh, float] = field(default_factory=dict)

    @staticmethod
    def of(plan: Plan) -> Plain:
        """Of the best plan so far."""
        again = any(operator.recompute for operator in plan.operators.values())
        work = None if again else plan.predicted.compute_seconds
        return Plain(seconds=plan.predicted.step_seconds, is_played=True, work_seconds=work)


class Contender(Protocol):
    """Another kind of answer than the one that is searched for."""

    @property
    def played(self) -> Prediction | None:
        """Of its best step without stages, once one was found."""

    def step_before(self, work: Work, plain: Plain | None) -> float:
        """Seconds of its best step, looked for now where that is worth it before such work begins; infinity where it is
        not, or where none is found. plain: what it must beat (None: nothing fits, whatever it takes)."""
