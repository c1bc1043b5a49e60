"""One list scheduler for all families of pipeline schedules; a family is a line of `FAMILIES`.

A rank keeps to one rule. It takes its forwards and its backwards in the order of its family (`orders.py`), so that so
many backwards come before each forward; F F F B F B F B ... B B where it may run three ahead. With split backward, W
(weight gradients) fill the gaps in which the rank would wait, and make room where memory is full; the rest comes last.
With p ranks and v chunks a rank:

    gpipe        all forwards first                zb-h1, zb-1p   1f1b, split backward, memory of p micro-batches
    1f1b         rank i runs p - 1 - i ahead       zb-h2, zb-2p   twice as far ahead, memory of 2p - 1
    interleaved  v > 1, twice as far ahead         zb-v, v-half, v-min   two chunks in a V; memory p, p / 2, p / 3
    hanayo       v = 2, 4, 8: waves                dualpipe-v     a V, most backwards whole and beside a forward
    2bw          1f1b that never drains            chimera, dualpipe     the V of one wave, and of dualpipe-v, unfolded:
                 (opt-in: weights of two steps)                   both directions, each stage on two ranks

Without W to fill gaps the order depends on no time. With them it does: all but ZB-1p and ZB-2p are the orders at equal
times (F = B = W, no communication, W holds all that F kept), those two the ones at the times of the model at hand. Zero
Bubble Pipeline Parallelism (arXiv 2401.10241); interleaving as in Megatron-LM (arXiv 2104.04473).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias

from autopar.errors import ConfigurationError
from autopar.schedules.actions import Kind, PipeAction, Schedule, producer
from autopar.schedules.building_blocks import BlockSteps, block_orders
from autopar.schedules.orders import (
    Orders,
    RankOrder,
    check_both_ways,
    delayed_orders,
    dual_orders,
    loop_orders,
    unfolded,
)
from autopar.schedules.waves import wave_orders

Fill: TypeAlias = Literal["greedy", "level"]
"""Which gaps take a W: greedy, all; level, those that it does not outlast, and any gap that would make the rank wait
longer in all than the rank that waits longest (so that no rank delays the others for a gap that costs nothing)."""

Order: TypeAlias = Literal["loop", "block", "wave", "dual", "delayed"]
"""The function of `orders.py`, `building_blocks.py` or `waves.py` that gives the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What tells one family of schedules from another."""

    order: Order = "loop"
    slope: int | None = 0
    """Of a loop: forwards that a rank runs ahead of its successor, before the first backward; None: all of them."""
    steps: BlockSteps = (1, 1, 1, 1)
    """Of a block."""
    split_backward: bool = False
    """W apart; then no rank keeps activations of more chunks than the order's limit, counted until their W."""
    fill: Fill = "greedy"
    chunks: tuple[int, ...] = (1,)
    """Stages per rank that are worth trying; the first is the least."""
    both_ways: bool = False
    """Unfolded: each stage stands on two ranks, of which each takes half of the micro-batches."""

    def takes(self, chunks: int) -> bool:
        """Whether there is such a schedule with so many stages per rank."""
        if self.order == "loop" and len(self.chunks) > 1:
            return True
        return chunks % 2 == 0 if self.order == "wave" and not self.both_ways else chunks in self.chunks


FAMILIES: Mapping[str, Policy] = {
    "gpipe": Policy(slope=None),
    "1f1b": Policy(slope=1),
    "interleaved": Policy(slope=2, chunks=(2, 3, 4, 6, 8)),
    "zb-h1": Policy(slope=1, split_backward=True),
    "zb-h2": Policy(slope=2, split_backward=True),
    "zb-v": Policy(order="block", steps=(4, 2, 4, 2), split_backward=True, chunks=(2,)),
    "v-half": Policy(order="block", steps=(2, 1, 2, 1), split_backward=True, chunks=(2,)),
    "v-min": Policy(order="block", steps=(1, 1, 1, 1), split_backward=True, chunks=(2,)),
    "zb-1p": Policy(slope=1, split_backward=True, fill="level"),
    "zb-2p": Policy(slope=2, split_backward=True, fill="level"),
    "hanayo": Policy(order="wave", chunks=(2, 4, 8)),
    "chimera": Policy(order="wave", both_ways=True),
    "dualpipe-v": Policy(order="dual", split_backward=True, chunks=(2,)),
    "dualpipe": Policy(order="dual", split_backward=True, both_ways=True),
    "2bw": Policy(order="delayed"),
}
TIMED_FAMILIES = frozenset({"zb-1p", "zb-2p"})
"""Families whose order follows from the model's times."""
OPT_IN_FAMILIES = frozenset({"2bw"})
"""Families that train otherwise than one device: only by name. 2bw: gradients are those at the weights before."""


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

    order: RankOrder
    actions: list[PipeAction] = field(default_factory=list)
    clock: float = 0.0
    waited: float = 0.0
    """Seconds of gaps behind the first forward."""
    forwards: int = 0
    """Turns taken."""
    backwards: int = 0
    pending: list[PipeAction] = field(default_factory=list)
    """W whose I is done, oldest first; `weights` of them are done too."""
    weights: int = 0
    held: float = 0.0
    """Micro-batches' worth of activations."""


@lru_cache(maxsize=64)
def build_schedule(family: str, num_ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The published schedule of a family, of num_ranks * chunks stages.

    A family of TIMED_FAMILIES is built for equal times. Raises ConfigurationError for an unknown family, or chunks or
    ranks with which the family has no schedule.
    """
    if family not in FAMILIES:
        raise ConfigurationError(f"no schedule is called {family!r}; there are {', '.join(FAMILIES)}")
    if num_ranks < 1 or micro_batches < 1 or chunks < 1:
        raise ConfigurationError(f"{num_ranks} ranks, {micro_batches} micro-batches, {chunks} chunks: at least 1 each")
    policy = FAMILIES[family]
    if not policy.takes(chunks):
        some = " or ".join(map(str, policy.chunks))
        raise ConfigurationError(f"{family} has chunks={some} on each rank, not {chunks}; `interleaved` has any")
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

    `weight_share` is the part of a micro-batch's activations that lives on from I to W; `memory_limit` replaces the
    policy's, in micro-batches of one stage. Raises ConfigurationError where the limit lets no micro-batch pass.
    """
    if not policy.both_ways:
        orders = _orders(policy, num_ranks, micro_batches, chunks, memory_limit)
        return _Builder(policy, orders, num_ranks * chunks, times, weight_share, memory_limit).run()
    check_both_ways(num_ranks)
    orders = _orders(policy, num_ranks // 2, (micro_batches + 1) // 2, 2 * chunks, memory_limit)
    folded = _Builder(policy, orders, num_ranks * chunks, times, weight_share, memory_limit).run()
    return unfolded(folded, micro_batches)


def _orders(policy: Policy, num_ranks: int, micro_batches: int, chunks: int, limit: float | None) -> Orders:
    match policy.order:
        case "loop":
            return loop_orders(num_ranks, micro_batches, chunks, policy.slope)
        case "block":
            return block_orders(num_ranks, micro_batches, policy.steps, math.inf if limit is None else limit)
        case "wave":
            return wave_orders(num_ranks, micro_batches, chunks)
        case "dual":
            return dual_orders(num_ranks, micro_batches)
        case "delayed":
            return delayed_orders(num_ranks, micro_batches)


class _Builder:
    """Grow all lists together: whoever can act next, acts."""

    def __init__(
        self,
        policy: Policy,
        orders: Orders,
        num_stages: int,
        times: StageTimes,
        weight_share: float,
        memory_limit: float | None,
    ) -> None:
        self.policy = policy
        self.times = times
        self.num_stages = num_stages
        self.ranks = [_Rank(order) for order in orders.ranks]
        self.left_over = {step for order in orders.ranks for step in order.backward if step[1] < 0}
        self.weight_share = weight_share if policy.split_backward else 0.0
        self.limit = orders.limit if policy.split_backward else math.inf
        if memory_limit is not None:
            self.limit = memory_limit
        self.ends: dict[tuple[int, str, int], float] = {}

    def run(self) -> Schedule:
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                moved |= self.act(rank)
        waiting = [i for i, rank in enumerate(self.ranks) if rank.backwards < len(rank.order.backward)]
        if waiting:
            raise ConfigurationError(
                f"rank {waiting[0]} cannot go on: activations of {self.limit:g} micro-batches are too few"
            )
        for rank in self.ranks:
            rank.actions.extend(rank.pending[rank.weights :])
        return Schedule(tuple(tuple(rank.actions) for rank in self.ranks))

    def act(self, rank: _Rank) -> bool:
        """Place the rank's next F or B, and the W in front of it; False where its input is not known yet."""
        action = self.next_action(rank)
        if action is None:
            return False
        arrival = self.arrival(action)
        if arrival is None:
            return False
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

    def next_action(self, rank: _Rank) -> PipeAction | None:
        """F while order and memory allow, else B; None at the end."""
        order = rank.order
        while rank.forwards < len(order.forward) and rank.backwards >= order.before[rank.forwards]:
            step = order.forward[rank.forwards]
            if step is None:
                rank.forwards += 1
            elif self.has_room(rank):
                return PipeAction(step[0], "F", step[1])
            else:
                break
        if rank.backwards == len(order.backward):
            return None
        stage, micro_batch = order.backward[rank.backwards]
        if (stage, "F", micro_batch) not in self.ends and micro_batch >= 0:
            return None
        kind: Kind = "I" if self.policy.split_backward and (stage, micro_batch) not in order.whole else "B"
        return PipeAction(stage, kind, micro_batch)

    def arrival(self, action: PipeAction) -> float | None:
        """When the action's input is there; None: not known yet."""
        needed = producer(action, self.num_stages)
        if needed is None or (action.micro_batch < 0 and (needed[0], action.micro_batch) not in self.left_over):
            return 0.0
        end = self.ends.get((*needed, action.micro_batch))
        return None if end is None else end + self.times.send[min(action.stage, needed[0])]

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
        elif action.kind == "B":
            rank.clock += times.backward[stage] + (times.weight[stage] if self.policy.split_backward else 0.0)
            rank.held -= 1.0
            rank.backwards += 1
        else:
            rank.clock += times.backward[stage]
            rank.held -= 1.0 - self.weight_share
            rank.backwards += 1
            rank.pending.append(PipeAction(stage, "W", action.micro_batch))
        self.ends[stage, "F" if action.kind == "F" else "gradient", action.micro_batch] = rank.clock
