"""The exact frontier of small steps by enumeration, and random steps to ask it of.

    list(frontier(graph))      [(peak bytes, seconds again), ...], each peak smaller, and no time shorter, than before

A state is how many operators have run once, and the values at hand; from it the next operator runs, one of forward
runs again, or a value is given up. The shortest path under a cap is found by Dijkstra's rule over all states, so that
nothing is assumed about a schedule but this: operators of backward run once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from benchmarks.recomputation.step_graph import StepGraph

State = tuple[int, int]
"""How many operators have run once; bits of the values at hand."""


def random_step(seed: int, least: int = 3, most: int = 6) -> StepGraph:
    """A chain of `least` to `most` operators with skips, and its backward in the order reversed: every operator of that
    reads gradients, and the result of its own one, the operands, both or neither. Bytes 1 to 8, seconds 1 to 9."""
    random = np.random.default_rng(seed)
    forward = int(random.integers(least, most + 1))
    reads: list[tuple[int, ...]] = []
    for k in range(forward):
        skip = [int(random.integers(0, k))] if k > 1 and random.random() < 0.4 else []
        reads.append(tuple(sorted({k - 1, *skip})) if k else ())
    for k in reversed(range(forward)):
        saved = ((k,), reads[k], reads[k], (k, *reads[k]), ())[int(random.integers(0, 5))]
        gradients = {2 * forward - 1 - later for later in range(k + 1, forward) if k in reads[later]}
        reads.append(tuple(sorted({*saved, *gradients})))
    sizes = [int(each) for each in random.integers(1, 9, forward)]
    return StepGraph(
        names=tuple(map(str, range(2 * forward))),
        seconds=tuple(map(float, random.integers(1, 10, 2 * forward))),
        reads=tuple(reads),
        makers=tuple(range(2 * forward)),
        value_bytes=(*sizes, *reversed(sizes)),
        forward=forward,
    )


def frontier(graph: StepGraph, apart: int = 1) -> Iterator[tuple[int, float]]:
    """From the peak without reruns down to the smallest there is; apart: bytes between two peaks at least."""
    cap = graph.peak_bytes(graph.once)
    while (found := _Search(graph, cap).shortest()) is not None:
        yield found
        cap = found[0] - apart


class _Search:
    """Schedules under a cap."""

    def __init__(self, graph: StepGraph, cap: int) -> None:
        self.graph, self.cap = graph, cap
        self.made = [sum(1 << value for value in graph.made(k)) for k in range(len(graph.names))]
        self.reads = [sum(1 << value for value in read) for read in graph.reads]
        self.gradients = [
            (1 << value, max(graph.readers(value), default=maker))
            for value, maker in enumerate(graph.makers)
            if maker >= graph.forward
        ]

    def shortest(self) -> tuple[int, float] | None:
        """(peak, seconds again) of the shortest one, of several the one that holds least."""
        queue: list[tuple[float, int, State]] = [(0.0, 0, (0, 0))]
        done = set[State]()
        while queue:
            again, peak, state = heapq.heappop(queue)
            if state[0] == len(self.reads):
                return peak, again
            if state in done:
                continue
            done.add(state)
            for seconds, held, following in self._next(*state):
                if following not in done and held <= self.cap:
                    heapq.heappush(queue, (again + seconds, max(peak, held), following))
        return None

    def _next(self, ran: int, here: int) -> Iterator[tuple[float, int, State]]:
        """(seconds, bytes meanwhile, the state behind)."""
        if not self.reads[ran] & ~here:
            there = here | self.made[ran]
            dead = sum(bit for bit, last in self.gradients if last <= ran)
            yield 0.0, self._bytes(there), (ran + 1, there & ~dead)
        for k in range(min(ran, self.graph.forward)):
            if self.made[k] & ~here and not self.reads[k] & ~here:
                there = here | self.made[k]
                yield self.graph.seconds[k], self._bytes(there), (ran, there)
        for value in range(len(self.graph.makers)):
            if here >> value & 1:
                yield 0.0, 0, (ran, here & ~(1 << value))

    def _bytes(self, there: int) -> int:
        return sum(size for value, size in enumerate(self.graph.value_bytes) if there >> value & 1)
