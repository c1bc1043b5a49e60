"""State of calls: which Python state the graphs of a module were captured in, per kind of call.

    digest(kind)             part of a graph's key: another one where alpha, a global or a hook is another
    captured(kind, reads)    a new graph has read these attributes: they count from now on

An attribute that no graph has read counts for none. That a value changed costs a capture and no error; what takes a
new value again and again is named in the log, since each value is a graph of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Set
from typing import Any

from torch import nn

from autopar.capture import PythonState, differences

log = logging.getLogger(__name__)

MANY = 8
"""Graphs of one kind of call after which the log says what keeps changing."""

SHOWN = 3
"""Changes that a line of the log names."""


class StateOfCalls:
    """The state of `model` and `loss_fn` as each kind of call has read it."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._states: dict[Hashable, PythonState] = {}
        self._reads: dict[Hashable, frozenset[tuple[str, str]]] = {}
        self._captured: dict[Hashable, list[dict[str, str]]] = {}
        self._any: PythonState | None = None
        self._first: dict[str, str] = {}
        self._versions: dict[str, str] = {}

    def digest(self, kind: Hashable) -> str:
        """sha256 (hex), the same on every rank that has the same values; "" where nothing was captured yet."""
        state = self._states.get(kind)
        return "" if state is None else state.digest()

    def texts(self, kind: Hashable) -> dict[str, str]:
        """Place ("alpha", "SCALE of my_module") -> value, as text: what `differences` compares."""
        state = self._states.get(kind)
        return {} if state is None else dict(state.texts)

    def version(self) -> str:
        """Which of the states that any call has read this is: "2 (alpha)" for the second one met, which differs from
        the first in alpha. Without values, as those of one rank may rightly be others."""
        if self._any is None:
            return ""
        digest = self._any.digest()
        if digest not in self._versions:
            changed = sorted(place for place, text in self._any.texts.items() if self._first.get(place, text) != text)
            self._versions[digest] = f"{len(self._versions) + 1} ({', '.join(changed) or 'as it was captured'})"
        return self._versions[digest]

    def captured(self, kind: Hashable, reads: Set[tuple[str, str]]) -> None:
        """Count what a new graph of this kind has read."""
        self._reads[kind] = self._reads.get(kind, frozenset()) | frozenset(reads)
        self._states[kind] = state = PythonState(self._model, self._reads[kind], self._loss_fn)
        self._any = PythonState(self._model, frozenset().union(*self._reads.values()), self._loss_fn)
        self._first = {**self._any.texts, **self._first}
        earlier = self._captured.setdefault(kind, [])
        if earlier:
            found = differences(earlier[-1], state.texts)
            changes = "; ".join(found[:SHOWN]) + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
            log.info("captured again for the same inputs: %s", changes)
            if len(earlier) == MANY:
                log.warning(
                    "%d graphs for the same inputs, each planned and lowered: %s. Pass what changes so often as a "
                    "0-dim tensor, or register it as a buffer",
                    MANY + 1,
                    changes,
                )
        earlier.append(dict(state.texts))

    def read_again(self) -> None:
        """After submodules were replaced."""
        for state in (*self._states.values(), *([] if self._any is None else [self._any])):
            state.read_again()
