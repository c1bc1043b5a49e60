"""One list scheduler for all families of pipeline schedules; a family is a few numbers.

A rank keeps to one rule. It runs forward while fewer chunks are in flight than its cap, else backward: F F F B F B F B
... B B. With split backward, W (weight gradients) fill the gaps in which the rank would wait, and make room where
memory is full; the rest comes last. With p ranks, v chunks a rank and micro-batches taken in groups of p, rank i has

    cap(i) = (v - 1) p + slope (p - 1 - i) + 1        chunks in flight,

and little more tells the families apart (`FAMILIES`):

    gpipe        no cap                         zb-h1, zb-1p   slope 1, split backward, memory of p micro-batches
    1f1b         slope 1, v = 1                 zb-h2, zb-2p   slope 2, split backward, memory of 2p - 1
    interleaved  slope 2, v > 1                 zb-v           cap 2p, split backward, two chunks in the shape of a V

Without W to fill gaps the order depends on no time. With them it does: ZB-H1 and ZB-H2 are the orders at equal times
(F = B = W, no communication, W holds all that F kept), ZB-1p and ZB-2p those at the times of the model at hand. Zero
Bubble Pipeline Parallelism (arXiv 2401.10241); interleaving as in Megatron-LM (arXiv 2104.04473).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias

from autopar.errors import ConfigurationError
from autopar.schedules.actions import Kind, PipeAction, Schedule, producer

Fill: TypeAlias = Literal["greedy", "level"]
"""Which gaps take a W: greedy, all; level, those that it does not outlast, and any gap that would make the rank wait
longer in all than the rank that waits longest (so that no rank delays the others for a gap that costs nothing)."""

Step: TypeAlias = tuple[int, int]
"""(stage, micro-batch)."""

Placement: TypeAlias = Literal["loop", "vee"]
"""Stage c p + i on rank i, or two chunks: stages i and 2p - 1 - i, so that the last stage stands on the first rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What tells one family of schedules from another."""

    slope: int | None
    """Forwards that a rank runs ahead of its successor, before the first backward; None: all of them."""
    split_backward: bool = False
    """W apart; then no rank keeps activations of more chunks than the first rank's cap, counted until their W."""
    fill: Fill = "greedy"
    placement: Placement = "loop"


FAMILIES: Mapping[str, Policy] = {
    "gpipe": Policy(slope=None),
    "1f1b": Policy(slope=1),
    "interleaved": Policy(slope=2),
    "zb-h1": Policy(slope=1, split_backward=True),
    "zb-h2": Policy(slope=2, split_backward=True),
    "zb-v": Policy(slope=0, split_backward=True, placement="vee"),
    "zb-1p": Policy(slope=1, split_backward=True, fill="level"),
    "zb-2p": Policy(slope=2, split_backward=True, fill="level"),
}
TIMED_FAMILIES = frozenset({"zb-1p", "zb-2p"})
"""Families whose order follows from the model's times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of the passes of each stage, and between a stage and the next; in stage order."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Of the input gradients; of all gradients where backward is not split."""
    weight: tuple[float, ...]
    send: tuple[float, ...]
    """From stage s to s + 1, and back; one fewer than stages."""

    @classmethod
    def equal(cls, num_stages: int) -> StageTimes:
        """F = B = W, and no communication."""
        ones = (1.0,) * num_stages
        return cls(forward=ones, backward=ones, weight=ones, send=(0.0,) * (num_stages - 1))


@dataclass(slots=True)
class _Rank:
    """A rank while its list grows."""

    cap: float
    forward_order: Sequence[Step | None]
    """None: a forward of a micro-batch that the step does not have; its turn passes, so that backwards keep theirs."""
    backward_order: Sequence[Step]
    actions: list[PipeAction] = field(default_factory=list)
    clock: float = 0.0
    waited: float = 0.0
    """Seconds of gaps behind the first forward."""
    forwards: int = 0
    """Turns taken."""
    backwards: int = 0
    pending: list[PipeAction] = field(default_factory=list)
    """W whose B is done, oldest first; `weights` of them are done too."""
    weights: int = 0
    held: float = 0.0
    """Micro-batches' worth of activations."""


@lru_cache(maxsize=64)
def build_schedule(family: str, num_ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The published schedule of a family; stage s stands on rank s % num_ranks, but zb-v's as its `Placement` says.

    A family of TIMED_FAMILIES is built for equal times. Raises ConfigurationError for an unknown family, or chunks
    where the family has none.
    """
    if family not in FAMILIES:
        raise ConfigurationError(f"no schedule is called {family!r}; there are {', '.join(FAMILIES)}")
    if num_ranks < 1 or micro_batches < 1 or chunks < 1:
        raise ConfigurationError(f"{num_ranks} ranks, {micro_batches} micro-batches, {chunks} chunks: at least 1 each")
    policy = FAMILIES[family]
    fixed = {"interleaved": chunks, "zb-v": 2}.get(family, 1)
    if chunks != fixed:
        raise ConfigurationError(f"{family} has chunks={fixed} on each rank, not {chunks}; `interleaved` has any")
    return list_schedule(policy, num_ranks, micro_batches, chunks, StageTimes.equal(num_ranks * chunks))


def list_schedule(
    policy: Policy,
    num_ranks: int,
    micro_batches: int,
    chunks: int,
    times: StageTimes,
    *,
    weight_share: float = 1.0,
    memory_limit: float | None = None,
) -> Schedule:
    """Build the schedule of a policy at these times.

    `weight_share` is the part of a micro-batch's activations that lives on from B to W; `memory_limit` replaces the
    policy's, in micro-batches. Raises ConfigurationError where the limit lets no micro-batch pass.
    """
    return _Builder(policy, num_ranks, micro_batches, chunks, times, weight_share, memory_limit).run()


class _Builder:
    """Grow all lists together: whoever can act next, acts."""

    def __init__(
        self,
        policy: Policy,
        num_ranks: int,
        micro_batches: int,
        chunks: int,
        times: StageTimes,
        weight_share: float,
        memory_limit: float | None,
    ) -> None:
        self.policy = policy
        self.times = times
        self.num_ranks = num_ranks
        self.num_stages = num_ranks * chunks
        group = max(len(group) for group in _groups(micro_batches, num_ranks))
        ahead = 2 * num_ranks if policy.placement == "vee" else (chunks - 1) * group + 1
        orders = _vee_orders if policy.placement == "vee" else _loop_orders
        self.ranks = [
            _Rank(_cap(policy.slope, ahead, num_ranks - 1 - rank), *orders(rank, num_ranks, micro_batches, chunks))
            for rank in range(num_ranks)
        ]
        self.weight_share = weight_share if policy.split_backward else 0.0
        self.limit = self.ranks[0].cap if policy.split_backward else math.inf
        if memory_limit is not None:
            self.limit = memory_limit
        self.ends: dict[tuple[int, str, int], float] = {}

    def run(self) -> Schedule:
        moved = True
        while moved:
            moved = False
            for index in range(self.num_ranks):
                moved |= self.act(index)
        waiting = [i for i, rank in enumerate(self.ranks) if rank.backwards < len(rank.backward_order)]
        if waiting:
            raise ConfigurationError(
                f"rank {waiting[0]} cannot go on: activations of {self.limit:g} micro-batches are too few"
            )
        for rank in self.ranks:
            rank.actions.extend(rank.pending[rank.weights :])
        return Schedule(tuple(tuple(rank.actions) for rank in self.ranks))

    def act(self, index: int) -> bool:
        """Place the rank's next F or B, and the W in front of it; False where its input is not known yet."""
        rank = self.ranks[index]
        action = self.next_action(index)
        if action is None:
            return False
        needed = producer(action, self.num_stages)
        arrival = 0.0
        if needed is not None:
            end = self.ends.get((*needed, action.micro_batch))
            if end is None:
                return False
            arrival = end + self.times.send[min(action.stage, needed[0])]
        if action.kind == "F":
            while rank.held + 1.0 > self.limit + 1e-9:
                self.weigh(rank)
        while rank.weights < len(rank.pending) and self.fits(rank, arrival):
            self.weigh(rank)
        if rank.forwards:
            rank.waited += max(0.0, arrival - rank.clock)
        rank.clock = max(rank.clock, arrival)
        self.place(rank, action)
        return True

    def next_action(self, index: int) -> PipeAction | None:
        """F while cap and memory allow, else B; None at the end."""
        rank = self.ranks[index]
        while rank.forwards < len(rank.forward_order) and rank.forwards - rank.backwards < rank.cap:
            step = rank.forward_order[rank.forwards]
            if step is None:
                rank.forwards += 1
            elif self.has_room(rank):
                return PipeAction(step[0], "F", step[1])
            else:
                break
        if rank.backwards == len(rank.backward_order):
            return None
        stage, micro_batch = rank.backward_order[rank.backwards]
        if (stage, "F", micro_batch) not in self.ends:
            return None
        kind: Kind = "I" if self.policy.split_backward else "B"
        return PipeAction(stage, kind, micro_batch)

    def has_room(self, rank: _Rank) -> bool:
        """Another forward fits, at the latest when all pending W are done."""
        freeable = (len(rank.pending) - rank.weights) * self.weight_share
        return rank.held - freeable + 1.0 <= self.limit + 1e-9

    def fits(self, rank: _Rank, arrival: float) -> bool:
        """The gap before `arrival` takes the oldest W."""
        gap = arrival - rank.clock
        if self.policy.fill == "greedy" or gap <= 0.0:
            return gap > 0.0
        longest = max(other.waited for other in self.ranks)
        return gap >= self.times.weight[rank.pending[rank.weights].stage] or rank.waited + gap > longest

    def weigh(self, rank: _Rank) -> None:
        self.place(rank, rank.pending[rank.weights])
        rank.weights += 1

    def place(self, rank: _Rank, action: PipeAction) -> None:
        times, stage = self.times, action.stage
        rank.actions.append(action)
        if action.kind == "W":
            rank.clock += times.weight[stage]
            rank.held -= self.weight_share
            return
        if action.kind == "F":
            rank.clock += times.forward[stage]
            rank.held += 1.0
            rank.forwards += 1
        else:
            rank.clock += times.backward[stage]
            rank.held -= 1.0 - self.weight_share
            rank.backwards += 1
            if action.kind == "I":
                rank.pending.append(PipeAction(stage, "W", action.micro_batch))
        self.ends[stage, "F" if action.kind == "F" else "gradient", action.micro_batch] = rank.clock


def _cap(slope: int | None, ahead: int, ranks_behind: int) -> float:
    return math.inf if slope is None else ahead + slope * ranks_behind


def _groups(micro_batches: int, num_ranks: int) -> list[range]:
    """Micro-batches in groups of about `num_ranks`, none smaller; what is left over makes groups longer."""
    rounds = max(1, micro_batches // num_ranks)
    bounds = [micro_batches * index // rounds for index in range(rounds + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]


def _loop_orders(rank: int, num_ranks: int, micro_batches: int, chunks: int) -> tuple[list[Step | None], list[Step]]:
    """Forward and backward order: a group passes one chunk, then the next."""
    groups = _groups(micro_batches, num_ranks)
    stages = [chunk * num_ranks + rank for chunk in range(chunks)]
    forward: list[Step | None] = [(stage, micro_batch) for group in groups for stage in stages for micro_batch in group]
    backward = [(stage, micro_batch) for group in groups for stage in stages[::-1] for micro_batch in group]
    return forward, backward


def _vee_orders(rank: int, num_ranks: int, micro_batches: int, chunks: int) -> tuple[list[Step | None], list[Step]]:
    """Forward and backward order: the way down until the first comes up, then both ways in turn.

    The first micro-batch is back when `lead` have gone down. Then p - rank more come up than go down: those whose
    backwards the ranks above wait for.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    lead = 2 * (num_ranks - rank) - 1
    forward = [(down, index) for index in range(lead)]
    for index in range(rank):
        forward += [(up, index), (down, lead + index)]
    forward += [(up, index) for index in range(rank, num_ranks)]
    for index in range(micro_batches):
        forward += [(down, lead + rank + index), (up, num_ranks + index)]
    backward = [(up, index) for index in range(num_ranks - rank)]
    for index in range(micro_batches):
        backward += [(down, index), (up, num_ranks - rank + index)]
    turns = [step if step[1] < micro_batches else None for step in forward]
    return turns, [step for step in backward if step[1] < micro_batches]
