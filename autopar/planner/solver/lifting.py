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
from autopar.planner.solver.problem import Floats, Integers
from autopar.planner.solver.repeats import Short, shorten

FEWEST_NODES = 800
"""Smaller cores are swept directly."""
SWEEPS_PER_LOOK, FEWEST_LOOKS, MAX_LOOKS = 10, 3, 40
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


def lift(core: Core, *, gap: float, deadline: Deadline, stop_above: float = np.inf) -> Lifted | None:
    """Return a start for `core` from a short copy of it, or None when it has no repeated layers.

    Sweeps end early where their messages, repeated, bound `core` above `stop_above`.
    """
    if len(core.costs) < FEWEST_NODES:
        return None
    short = shorten(core)
    if short is None:
        return None
    shallow = DualAscent(short.core, schedule_ranks(short.core))
    deep = DualAscent(core, class_ranks(core))

    def is_enough() -> bool:
        _repeat_messages(shallow.shared_messages(), shallow, short, deep)
        return deep.label_bounds(deep.messages).bound > stop_above

    labels, sweeps = _converge(shallow, gap, deadline, is_enough if np.isfinite(stop_above) else None)
    proof = None
    if np.isfinite(stop_above) and is_enough():
        proof = deep.messages.copy()
    _repeat_messages(shallow.messages, shallow, short, deep)
    repeated = np.where(short.nodes >= 0, labels[short.nodes], 0)
    return Lifted(ascent=deep, labels=deep.improve(repeated), sweeps=sweeps, proof=proof)


def _converge(
    ascent: DualAscent, gap: float, deadline: Deadline, is_enough: Callable[[], bool] | None
) -> tuple[Integers, int]:
    """Sweep until the gap is closed or stays, or for the bound of the deep core; return the best labels met and the
    number of sweeps."""
    best, objective, bound, left = np.zeros(0, dtype=np.int64), np.inf, -np.inf, np.inf
    for look in range(1, MAX_LOOKS + 1):
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


def _repeat_messages(messages: Floats, shallow: DualAscent, short: Short, deep: DualAscent) -> None:
    for edge, source in enumerate(short.edges.tolist()):
        if source >= 0:
            start, end = shallow.message_starts[source], shallow.message_starts[source + 1]
            deep.messages[deep.message_starts[edge] : deep.message_starts[edge + 1]] = messages[start:end]
