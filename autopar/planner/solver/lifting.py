"""Dual lifting: sweep a short copy of a deep core until it converges, then start the deep one from its messages.

A sweep over 126 layers in schedule order costs 126 times a layer, and information moves slowly along the chain. The
short copy of `repeats.shorten` has five layers and converges in the same number of sweeps; its messages, repeated, are
nearly a fixed point of the deep core, which then needs a few sweeps over all copies of a node at once (`class_ranks`).
Its labels, repeated, are an assignment of the deep core. Both are only starts: bound and objective are computed on the
deep core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.planner.solver.deadline import Deadline
from autopar.planner.solver.dual_ascent import Core, DualAscent, class_ranks, schedule_ranks
from autopar.planner.solver.labelling import Floats, Integers
from autopar.planner.solver.repeats import Short, shorten

FEWEST_NODES = 300
"""Smaller cores are swept directly."""
SWEEPS_PER_LOOK, FEWEST_LOOKS, MAX_LOOKS = 10, 3, 4
"""Forty sweeps at most, without prices of bytes: what they leave, fixed labels and elimination close on the deep core.
To the proof OLMoE on (4, 16) takes 4.7 CPU s, and 22 with up to 400 sweeps; Llama-3-8B on (2, 128) 3.4 and 9.8."""
STALLED = 0.97
"""The short copy has converged when ten sweeps leave this part of its gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifted:
    """An ascent of the deep core with lifted messages, and lifted labels as positions. proof: messages that bound the
    deep core above what was asked, if they were met."""

    ascent: DualAscent
    labels: Integers
    sweeps: int
    proof: Floats | None


class Lifting:
    """A deep core beside its short copy. `shallow` is swept, `deep` receives its messages."""

    def __init__(self, core: Core, short: Short) -> None:
        self.short = short
        self.shallow = DualAscent(short.core, schedule_ranks(short.core))
        self.deep = DualAscent(core, class_ranks(core))
        copied = np.flatnonzero(short.edges >= 0)
        sources = short.edges[copied]
        lengths = np.diff(self.deep.message_starts)[copied]
        self._into = ranges(self.deep.message_starts[copied], lengths)
        self._out_of = ranges(self.shallow.message_starts[sources], lengths)

    def converge(
        self,
        gap: float,
        deadline: Deadline,
        is_enough: Callable[[], bool] | None = None,
        most_looks: int = MAX_LOOKS,
    ) -> tuple[Integers, int]:
        """Sweep the short copy until its gap is closed or stays, or for the bound of the deep core, or for a number of
        looks; return the best labels met, repeated and improved on the deep core, and the number of sweeps."""
        labels, sweeps = _converge(self.shallow, gap, deadline, is_enough, most_looks)
        return self.deep.improve(np.where(self.short.nodes >= 0, labels[self.short.nodes], 0)), sweeps

    def repeat(self, messages: Floats) -> None:
        """Give every edge of the deep core the messages of its copy."""
        self.deep.messages[self._into] = messages[self._out_of]


def lift(core: Core, *, gap: float, deadline: Deadline, stop_above: float = np.inf) -> Lifted | None:
    """Return a start for `core` from a short copy of it, or None when it has no repeated layers.

    Sweeps end early where their messages, repeated, bound `core` above `stop_above`.
    """
    short = shorten(core) if len(core.costs) >= FEWEST_NODES else None
    if short is None:
        return None
    pair = Lifting(core, short)

    def is_enough() -> bool:
        pair.repeat(pair.shallow.shared_messages())
        return pair.deep.label_bounds(pair.deep.messages).bound > stop_above

    asked = np.isfinite(stop_above)
    labels, sweeps = pair.converge(gap, deadline, is_enough if asked else None)
    proof = pair.deep.messages.copy() if asked and is_enough() else None
    pair.repeat(pair.shallow.messages)
    return Lifted(ascent=pair.deep, labels=labels, sweeps=sweeps, proof=proof)


def _converge(
    ascent: DualAscent, gap: float, deadline: Deadline, is_enough: Callable[[], bool] | None, most_looks: int
) -> tuple[Integers, int]:
    """Sweep until one of the ends of `Lifting.converge`; return the best labels met and the number of sweeps."""
    best, objective, bound, left = np.zeros(0, dtype=np.int64), np.inf, -np.inf, np.inf
    for look in range(1, most_looks + 1):
        for _ in range(SWEEPS_PER_LOOK):
            ascent.sweep(True)
            ascent.sweep(False)
        chosen = ascent.improve(ascent.round_backward_messages())
        value = ascent.objective(chosen)
        if value < objective:
            best, objective = chosen, value
        bound = max(bound, ascent.label_bounds(ascent.shared_messages()).bound)
        before, left = left, objective - bound
        stalled = look > FEWEST_LOOKS and left > STALLED * before
        if stalled or left <= gap * abs(objective) or deadline.left() <= 0.0:
            break
        if is_enough is not None and is_enough():
            break
    return best, look * SWEEPS_PER_LOOK


def ranges(starts: Integers, lengths: Integers) -> Integers:
    """Return start, start + 1, .. of every range, one after the other."""
    ends = np.cumsum(lengths)
    return np.asarray(np.arange(int(lengths.sum())) + np.repeat(starts - (ends - lengths), lengths))
