"""Kept steps: the functions of the graphs that a module has met, the least recently used dropped beyond a bound.

    steps = KeptSteps(bound=most_graphs(first.program))
    steps.keep(key, step)            # beyond the bound the one whose last call is the longest ago goes, never the first
    steps.find(key)                  # None where it is to be made

A small model may keep a graph for each of a hundred lengths, a large one a few. The first one stays: its plan holds the
layouts of the parameters. All ranks call a module alike, and have one bound, so they drop alike; graphs are made by all
ranks together.
"""

from __future__ import annotations

import logging
import os

from autopar.errors import ConfigurationError
from autopar.program import Program
from autopar.runtime.step.batches import Signature
from autopar.runtime.step.emitted_step import Step

log = logging.getLogger(__name__)

VARIABLE = "AUTOPAR_GRAPHS"
LEAST_BOUND = 16
"""Training and evaluation, each with a shorter last batch, at four lengths."""
KEPT_OPERATORS = 30_000
"""Of all graphs together, where more than the least bound are kept. An operator takes 9 KiB of the host, with what it
was lowered to (measured: a GPT of two layers on one process, 2.8 MiB a graph), so these take 270 MiB."""
KEYS_REMEMBERED = 256
"""Of dropped graphs: that one comes back is worth a warning."""


def most_graphs(program: Program) -> int:
    """How many graphs like a program a module keeps, or as $AUTOPAR_GRAPHS says. Raises ConfigurationError."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return max(LEAST_BOUND, KEPT_OPERATORS // len(program.graph.nodes))
    if not given.isdecimal() or int(given) < 2:
        raise ConfigurationError(f"{VARIABLE}={given!r}: write how many graphs a module may keep, at least 2")
    return int(given)


class KeptSteps:
    """See the module docstring."""

    def __init__(self, bound: int) -> None:
        """bound: steps, at least 2."""
        self._bound = bound
        self._steps: dict[Signature, Step] = {}
        self._first: Signature | None = None
        self._dropped: dict[Signature, None] = {}
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._steps)

    def find(self, key: Signature) -> Step | None:
        """The step of this key, which is now the one used last."""
        step = self._steps.pop(key, None)
        if step is not None:
            self._steps[key] = step
        return step

    def keep(self, key: Signature, step: Step) -> None:
        """Keep a new one, and drop another where there are too many."""
        if self._first is None:
            self._first = key
        self._steps[key] = step
        while len(self._steps) > self._bound:
            self._drop(next(old for old in self._steps if old != self._first))
        log.info(f"graph {len(self._steps)} of at most {self._bound}")
        if key in self._dropped and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"a graph was made again that had been dropped: the inputs have more than {self._bound} different "
                f"forms; pad them to fewer lengths, or let the module keep more graphs ({VARIABLE})"
            )

    def renew(self, step: Step) -> None:
        """Take another first step in the place of that of now, and none of the others, which are made again."""
        assert self._first is not None
        self._steps = {self._first: step}

    def _drop(self, key: Signature) -> None:
        del self._steps[key]
        self._dropped[key] = None
        if len(self._dropped) > KEYS_REMEMBERED:
            del self._dropped[next(iter(self._dropped))]
        log.info(f"dropped the graph that was used least recently: {self._bound} are kept ({VARIABLE})")
