"""The square-root rule (Chen et al., Training deep nets with sublinear memory cost, 2016) and DTR (Kirisame et al.,
Dynamic tensor rematerialization, ICLR 2021), as schedules of the same step."""

from __future__ import annotations

import math
from collections.abc import Collection

from benchmarks.recomputation.step_graph import Schedule, StepGraph

MOST_RUNS = 50
"""Of an operator on average, behind which DTR is taken to have no end."""


def square_root(graph: StepGraph) -> Schedule:
    """Forward in sqrt(n) runs of about equal length: kept is what crosses into a later run, and all of the last run;
    backward makes the rest of a run again when it first reads of it."""
    length = math.ceil(graph.forward / math.ceil(math.sqrt(graph.forward)))
    last = (graph.forward - 1) // length
    kept = {
        value
        for value, maker in enumerate(graph.makers)
        if maker // length == last
        or any(maker // length < reader // length for reader in graph.readers(value) if reader < graph.forward)
    }
    return _made_again_late(graph, kept)


def _made_again_late(graph: StepGraph, kept: Collection[int]) -> Schedule:
    """Every operator of forward whose values are not kept runs again, once, where backward first wants it."""
    schedule = list(range(graph.forward))
    at_hand = {operator for operator in range(graph.forward) if set(graph.made(operator)) <= set(kept)}

    def run(operator: int) -> None:
        for value in graph.reads[operator]:
            if value not in kept and graph.makers[value] not in at_hand:
                run(graph.makers[value])
        at_hand.add(operator)
        schedule.append(operator)

    for operator in range(graph.forward, len(graph.names)):
        run(operator)
    return tuple(schedule)


def dtr(graph: StepGraph, budget_bytes: float) -> Schedule | None:
    """The step as DTR runs it: where bytes are short, the value of the smallest seconds / (bytes x age) is evicted,
    seconds with those of its evicted neighbours (h of the paper, eager eviction of what the program has let go); None
    where nothing can be evicted any more or it goes on without end."""
    try:
        return _Dtr(graph, budget_bytes).run()
    except MemoryError:
        return None


class _Dtr:
    def __init__(self, graph: StepGraph, budget_bytes: float) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes
        self.used_at: dict[int, float] = {}
        """Values at hand, and when each was made or read last, in seconds."""
        self.now = 0.0
        self.pinned: list[int] = []
        self.made: set[int] = set()
        self.schedule: list[int] = []

    def run(self) -> Schedule:
        graph = self.graph
        for operator in range(len(graph.names)):
            self._run(operator)
            for value in list(self.used_at):
                if all(reader <= operator for reader in graph.readers(value)):
                    del self.used_at[value]
        return tuple(self.schedule)

    def _run(self, operator: int) -> None:
        graph, pins = self.graph, len(self.pinned)
        self.pinned += graph.reads[operator]
        for value in graph.reads[operator]:
            if value not in self.used_at:
                self._run(graph.makers[value])
        made = [value for value in graph.made(operator) if value not in self.used_at]
        self._make_room(sum(graph.value_bytes[value] for value in made))
        self.schedule.append(operator)
        if len(self.schedule) > MOST_RUNS * len(graph.names):
            raise MemoryError
        self.now += graph.seconds[operator]
        for value in (*made, *graph.reads[operator]):
            self.used_at[value] = self.now
        self.made.add(operator)
        del self.pinned[pins:]

    def _make_room(self, wanted: int) -> None:
        while sum(self.graph.value_bytes[value] for value in self.used_at) + wanted > self.budget_bytes:
            free = [value for value in self.used_at if value not in self.pinned and self.graph.value_bytes[value]]
            if not free:
                raise MemoryError
            del self.used_at[min(free, key=self._score)]

    def _score(self, value: int) -> float:
        graph, maker = self.graph, self.graph.makers[value]
        again = {maker, *self._evicted(maker, up=True), *self._evicted(maker, up=False)}
        age = max(self.now - self.used_at[value], 1e-12)
        return sum(graph.seconds[operator] for operator in again) / (graph.value_bytes[value] * age)

    def _evicted(self, operator: int, *, up: bool, found: set[int] | None = None) -> set[int]:
        """Operators that would run again, too: what makes evicted values on the way up, or reads them on the way
        down."""
        graph, found = self.graph, set() if found is None else found
        if up:
            beside = {graph.makers[value] for value in graph.reads[operator] if value not in self.used_at}
        else:
            beside = {reader for value in graph.made(operator) for reader in graph.readers(value)}
            beside = {each for each in beside & self.made if not any(v in self.used_at for v in graph.made(each))}
        for each in beside - found:
            found.add(each)
            self._evicted(each, up=up, found=found)
        return found
