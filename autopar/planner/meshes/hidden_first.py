"""Where memory is short: the search that takes communication of parameters as hidden comes first.

    8 H100, Llama-3-8B, 8 x 8,192 tokens, cp=8     plain sum             1.02 s     played 1.00 s
                                                   a tenth of them       0.92 s     played 0.90 s

A plan under the plain sum pays for gathered and reduced parameters with memory or with operators that run again, which
the played step may not ask: it hides them. What is found so is another answer (`Contender`) beside the plain search:
meshes whose plain optimum, whatever the memory, is no shorter than its played step are then not fitted, nor is the
batch cut into more parts for them. An estimate: a plan whose sum is above a played step may be played faster itself,
which this sum, by the communication that it leaves out, is there to find.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.layouts.placement import Mesh
from autopar.planner.meshes.choose_mesh import Chosen, roles_of
from autopar.planner.meshes.choose_step import OtherSums, as_played
from autopar.planner.meshes.contenders import Contender, Plain, Work
from autopar.planner.one_mesh.mesh_plan import Candidate, shows_beyond
from autopar.planner.one_mesh.query import Query
from autopar.planner.problem.limits import LIMITS
from autopar.plans.plan_value import Prediction

log = logging.getLogger(__name__)


class HiddenFirst:
    """A `Contender` beside another one, if any: asked where the best optimum does not fit, it looks once for the
    plan under `LIMITS.shares_under_memory`. query: of the whole batch. sums: of it, once it looked; best: what it
    found."""

    def __init__(self, query: Query, other: Contender | None) -> None:
        self._query, self._other, self._other_seconds = query, other, math.inf
        self.sums: OtherSums | None = None
        self.best: Candidate | None = None

    @property
    def played(self) -> Prediction | None:
        """As of a `Contender`."""
        return None if self.best is None else self.best.plan.predicted

    def step_before(self, work: Work, plain: Plain | None) -> float:
        """As of a `Contender`."""
        if plain is not None and plain.is_short and self.sums is None:
            self.look(plain.bounds)
        own = math.inf if self.best is None else _step(self.best)
        if self._other is None:
            return own
        if self.best is not None and plain is not None and own < plain.seconds:
            plain = Plain.of(self.best.plan)
        other = self._other.step_before(work, plain)
        self._other_seconds = min(other, self._other_seconds)
        return min(own, other)

    def look(self, bounds: Mapping[Mesh, float]) -> None:
        """Search under these shares, until one is played as its sum says. bounds: of the meshes that were solved under
        the plain sum, in seconds."""
        log.info("memory is short: first with communication of parameters hidden")
        search = self._query.search
        self.sums = OtherSums(self._query, bounds)
        for share in LIMITS.shares_under_memory:
            below = math.inf if self.best is None else _step(self.best)
            self.best = self.sums.shortest((share,), below, search, search.hidden_seconds) or self.best
            if self.best is not None and not shows_beyond(self.best.plan):
                break

    def better_of(self, plain: Chosen) -> Chosen:
        """What the plain search chose, or what is played faster than that and than the other contender."""
        known = self._other_seconds if plain.best is None else _step(plain.best)
        if self.best is None or known <= _step(self.best):
            return plain
        chosen = replace(as_played(plain, self.best), axis_notes=roles_of(self._query, self.best))
        return replace(chosen, others=())


def _step(candidate: Candidate) -> float:
    return candidate.plan.predicted.step_seconds

