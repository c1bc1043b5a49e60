"""Reruns: which operators of forward backward runs again, and when, and what the step then holds.

    forward   a b c d          saved: b                      backward of c reads c, that of a reads a
    backward  [c] c' [a] a'    c and a run again where backward first reads them; a second time where they were given up

Segments (`recomputation.py`) and trees of them (`nested_spans.py`) restrict what may run again together, for the sake
of large models. A step of few operators needs no such restriction: `rerun_program.py` finds the fewest seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from autopar.planner.problem.prices import Floats

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""(operator of backward, operator of forward that runs again just before it), in the order of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What runs once, in order. seconds: of an operator; reads: its values; makers, value_bytes: of a value; forward:
    how many operators are of forward; repeatable: those that may run again; anywhere: those that backward runs by
    itself, which are never saved; returned: values that live to the end."""

    seconds: Sequence[float]
    reads: Sequence[Sequence[int]]
    makers: Sequence[int]
    value_bytes: Sequence[float]
    forward: int
    repeatable: frozenset[int]
    anywhere: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()

    def made(self) -> list[list[int]]:
        """Operator -> the values that it makes."""
        found: list[list[int]] = [[] for _ in self.reads]
        for value, maker in enumerate(self.makers):
            found[maker].append(value)
        return found


@dataclass(frozen=True, slots=True)
class Reruns:
    """anew: operator of forward that is not saved -> the operators of backward before which it is given up, and made
    once more if anything wants it; seconds: of all that runs again; is_proven: that no other takes fewer."""

    anew: Mapping[int, tuple[int, ...]]
    seconds: float = 0.0
    is_proven: bool = False


def runs_of(step: Step, reruns: Reruns) -> Runs:
    """What backward runs again: an operator that is not saved, where something first wants it."""
    at_hand = set(range(step.forward)) - set(reruns.anew) - step.anywhere
    given_up: dict[int, list[int]] = {}
    for operator, moments in reruns.anew.items():
        for moment in moments:
            given_up.setdefault(moment, []).append(operator)
    found: list[tuple[int, int]] = []

    def make(operator: int, late: int) -> None:
        for value in step.reads[operator]:
            maker = step.makers[value]
            if maker not in at_hand and maker < step.forward:
                make(maker, late)
                at_hand.add(maker)
                found.append((late, maker))

    for late in range(step.forward, len(step.reads)):
        at_hand.difference_update(given_up.get(late, ()))
        make(late, late)
    return tuple(found)


def held_over_time(step: Step, runs: Runs) -> Floats:
    """(operators,) bytes at the fullest moment of every operator, what runs again before it included."""
    moments = [(k, k) for k in range(step.forward)]
    again: dict[int, list[int]] = {}
    for late, operator in runs:
        again.setdefault(late, []).append(operator)
    for late in range(step.forward, len(step.reads)):
        moments += [(late, operator) for operator in (*again.get(late, ()), late)]
    change, made = np.zeros(len(moments) + 1), step.made()
    born, last = dict[int, int](), dict[tuple[int, int], int]()
    for moment, (_, operator) in enumerate(moments):
        for value in step.reads[operator]:
            last[value, born[value]] = moment
        for value in made[operator]:
            born[value] = moment
            last[value, moment] = moment
    for (value, first), end in last.items():
        change[first] += step.value_bytes[value]
        change[(len(moments) - 1 if value in step.returned else end) + 1] -= step.value_bytes[value]
    found = np.zeros(len(step.reads))
    np.maximum.at(found, [place for place, _ in moments], np.cumsum(change)[:-1])
    return found
