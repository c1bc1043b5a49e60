"""Known first: pipelines are compared only where one of them may be faster than what is known by then.

    best guess of a pipeline   known plan, played   pipelines
    7.0 s                      -                    compared: far below a step without stages, 16 s
    1.16 s                     1.03 s               not compared: their micro-batches would have to be captured
    25.0 s                     -                    405 B parameters on 512 nodes: compared, 25.2 s without a limit

The guess (`stages/promise.py`) takes perfect work, and on H100 clusters pipelines were played 1.4 to 2.4 times as long
as guessed; but it is no bound. Where a model fills more than a node, it is enough that they look faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.parallel_plan import Plan
from autopar.plan_text import format_seconds
from autopar.planner.choose_mesh import Chosen
from autopar.planner.query import Query
from autopar.planner.stages.free import FreePipelines
from autopar.planner.stages.promise import Guess, Traffic, guesses, look_faster


class KnownFirst:
    """A `Rival`: pipelines, unless all look slower than a known plan. query: of the whole batch;
    known_seconds: of the shortest played step of a known plan, infinity where there is none.

    were_asked: whether pipelines were compared, or why not is known."""

    def __init__(self, query: Query, pipelines: FreePipelines, known_seconds: Callable[[], float]) -> None:
        self._query, self._pipelines, self._known_seconds = query, pipelines, known_seconds
        self.were_asked = False

    @property
    def step_seconds(self) -> float:
        """Of the best pipeline that was compared so far; infinity where there is none."""
        return self._pipelines.step_seconds

    def before_finer(self, free_seconds: float) -> float:
        """As of `FreePipelines`, which compares them here only where they look far faster."""
        seconds = self._pipelines.before_finer(free_seconds)
        self.were_asked = self.were_asked or math.isfinite(seconds)
        return seconds

    def before_fitting(self, free_seconds: float) -> float:
        """As of `FreePipelines`; infinity where a known plan is faster than the best guess."""
        if self._look_slower(free_seconds):
            return math.inf
        self.were_asked = True
        return self._pipelines.before_fitting(free_seconds)

    def before_more_parts(self, plan: Plan | None) -> float:
        """As of `FreePipelines`; infinity where a known plan is faster than the best guess."""
        if plan is not None and self._look_slower(plan.predicted.step_seconds):
            return math.inf
        self.were_asked = self.were_asked or plan is not None
        return self._pipelines.before_more_parts(plan)

    def better_of(self, plan: Plan) -> Plan:
        """As of `FreePipelines`; the plan where none was compared and it is faster than the best guess."""
        if self.were_asked or self._query.search.compares_all_pipelines:
            return self._pipelines.better_of(plan)
        guess, step = self._guess, plan.predicted.step_seconds
        if guess < step:
            return self._pipelines.better_of(plan)
        if math.isinf(guess) or self._query.cluster.num_nodes == 1:
            return plan
        note = f"no pipeline was compared: the best one is guessed at {format_seconds(guess)}, more than the plan takes"
        return replace(plan, notes=(*plan.notes, note))

    def instead(self, chosen: Chosen) -> Plan | None:
        """As of `FreePipelines`."""
        return self._pipelines.instead(chosen)

    def _look_slower(self, plain_seconds: float) -> bool:
        if self.were_asked or self._query.search.compares_all_pipelines:
            return False
        return not look_faster(self._query, self._traffic, self._guesses, plain_seconds) and (
            self._guess >= self._known_seconds()
        )

    @cached_property
    def _traffic(self) -> Traffic:
        return Traffic.of(self._query)

    @cached_property
    def _guesses(self) -> Sequence[Guess]:
        return guesses(self._query, self._traffic)

    @property
    def _guess(self) -> float:
        """Seconds of the most promising pipeline; infinity where none can be made."""
        return self._guesses[0].seconds if self._guesses else math.inf
