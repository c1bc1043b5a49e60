"""Waves (Hanayo, SC 2023): the stages go down and up the ranks several times; who is free takes what is ready.

A rank that is free takes a backward before a forward, and of several the oldest micro-batch. At most p micro-batches
are on their way, so that no rank keeps more than 1F1B does. Two ranks, one wave, two micro-batches, passes of one unit:

    0F0,0F1,.,3F0,3B0,3F1,3B1,0B0,.,0B1
    .,1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1

Unfolded, one wave is Chimera (SC 2021): the same ranks twice, in both directions.
"""

from __future__ import annotations

import heapq

from autopar.schedules.orders import Orders, RankOrder, Step, merged, zigzag


def wave_orders(num_ranks: int, micro_batches: int, chunks: int) -> Orders:
    """The order of every rank, of `chunks` / 2 waves."""
    return Orders(ranks=_Dispatch(num_ranks, micro_batches, num_ranks * chunks).run(), limit=float("inf"))


class _Dispatch:
    """Time goes on in units of one pass."""

    def __init__(self, num_ranks: int, micro_batches: int, num_stages: int) -> None:
        self.num_ranks, self.micro_batches, self.num_stages = num_ranks, micro_batches, num_stages
        self.ready: list[list[tuple[bool, int, int]]] = [[] for _ in range(num_ranks)]
        """Per rank (is forward, micro-batch, what is left to do), the one to take in front."""
        self.begun = 0

    def run(self) -> list[RankOrder]:
        taken: list[list[tuple[str, Step]]] = [[] for _ in range(self.num_ranks)]
        for _ in range(min(self.num_ranks, self.micro_batches)):
            self.begin()
        while any(self.ready):
            now = [(rank, heapq.heappop(queue)) for rank, queue in enumerate(self.ready) if queue]
            for rank, (is_forward, micro_batch, left) in now:
                stage = self.num_stages - 1 - left if is_forward else left
                taken[rank].append(("F" if is_forward else "B", (stage, micro_batch)))
                self.go_on(is_forward, micro_batch, left)
        return [merged(actions) for actions in taken]

    def begin(self) -> None:
        """One more micro-batch is at the first stage."""
        if self.begun < self.micro_batches:
            heapq.heappush(self.ready[0], (True, self.begun, self.num_stages - 1))
            self.begun += 1

    def go_on(self, is_forward: bool, micro_batch: int, left: int) -> None:
        """What follows a pass is ready a unit later. `left` counts the stages that the way still has."""
        if is_forward:
            behind = (True, micro_batch, left - 1) if left else (False, micro_batch, self.num_stages - 1)
        elif left:
            behind = (False, micro_batch, left - 1)
        else:
            self.begin()
            return
        stage = self.num_stages - 1 - behind[2] if behind[0] else behind[2]
        heapq.heappush(self.ready[zigzag(stage, self.num_ranks)], behind)
