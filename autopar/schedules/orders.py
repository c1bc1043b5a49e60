"""In what order a rank takes its forwards and its backwards: one small function for each shape of schedule.

    loop_orders(2, 3, 1, slope=1)       rank 0: forwards 0F0 0F1 0F2, backwards 0B0 0B1 0B2; the second backward comes
                                        before the third forward, as rank 0 may run two ahead

`before[k]` says how many backwards come before the k-th forward; the rest (W, memory, who waits for whom) is the list
scheduler's. `loop` places stage c p + i on rank i; all others go down and up the ranks in turn (`zigzag`), so that a
stage's output often stays where it is. What follows a V with two chunks a rank unfolds into pipelines in both
directions (`unfolded`): rank i of the first half and its mirror p - 1 - i both play rank i of the V, with two sets of
micro-batches, one for each direction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.errors import ConfigurationError
from autopar.schedules.actions import PipeAction, Schedule

Step: TypeAlias = tuple[int, int]
"""(stage, micro-batch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """What one rank takes, in order."""

    forward: Sequence[Step | None]
    """None: a forward of a micro-batch that the step does not have; its turn passes, so that backwards keep theirs."""
    backward: Sequence[Step]
    before: Sequence[float]
    """Backwards that come before each forward."""
    whole: frozenset[Step] = frozenset()
    """Backwards that are not split, where the others are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """limit: chunks whose activations a rank may keep until their W."""

    ranks: Sequence[RankOrder]
    limit: float


def loop_orders(num_ranks: int, micro_batches: int, chunks: int, slope: int | None) -> Orders:
    """A group of micro-batches passes one chunk, then the next; rank i keeps (v - 1) p + slope (p - 1 - i) + 1 at once.

    slope None: all forwards come first.
    """
    groups = _groups(micro_batches, num_ranks)
    ahead = (chunks - 1) * max(len(group) for group in groups) + 1
    ranks = []
    for rank in range(num_ranks):
        stages = [chunk * num_ranks + rank for chunk in range(chunks)]
        cap = math.inf if slope is None else ahead + slope * (num_ranks - 1 - rank)
        forward = [(stage, index) for group in groups for stage in stages for index in group]
        backward = [(stage, index) for group in groups for stage in stages[::-1] for index in group]
        ranks.append(RankOrder(forward=forward, backward=backward, before=[k - cap + 1 for k in range(len(forward))]))
    return Orders(ranks=ranks, limit=math.inf if slope is None else ahead + slope * (num_ranks - 1))


def delayed_orders(num_ranks: int, micro_batches: int) -> Orders:
    """PipeDream-2BW (arXiv 2006.09503): rank i leaves p - 1 - i backwards to the next step and begins with those that
    the step before left, so that forwards and backwards alternate throughout."""
    ranks = []
    for rank in range(num_ranks):
        left = min(num_ranks - 1 - rank, micro_batches - 1)
        forward = [(rank, index) for index in range(micro_batches)]
        backward = [(rank, index - left) for index in range(micro_batches)]
        ranks.append(RankOrder(forward=forward, backward=backward, before=range(micro_batches)))
    return Orders(ranks=ranks, limit=math.inf)


def dual_orders(num_ranks: int, micro_batches: int) -> Orders:
    """DualPipe-V (deepseek-ai/DualPipe, dualpipev.py): whole backwards beside forwards, split ones at both ends.

    With F0, F1 forwards of the chunk on the way down and up, B0, B1 whole and I0, I1 split backwards, rank i takes

        2 (p - 1 - i) F0;  i + 1 times F0 F1;  p - 1 - i times I1 F1;  then F0 B1 F1 B0 while there is F0;
        p - 1 - i times B1 F1 B0;  i + 1 times B1 B0, the later half split;  p - 1 - i times I0

    for at least 2p micro-batches; of fewer, those that exist.
    """
    ranks = [_dual_order(rank, num_ranks, micro_batches) for rank in range(num_ranks)]
    return Orders(ranks=ranks, limit=2 * num_ranks + 1)


def _dual_order(rank: int, num_ranks: int, micro_batches: int) -> RankOrder:
    total, behind = max(micro_batches, 2 * num_ranks), num_ranks - 1 - rank
    plain = ["F0"] * (2 * behind) + ["F0", "F1"] * (rank + 1) + ["I1", "F1"] * behind
    plain += ["F0", "B1", "F1", "B0"] * (total - 2 * num_ranks + rank + 1) + ["B1", "F1", "B0"] * behind
    half = (rank + 1) // 2
    last = [chunk for _ in range(rank + 1) for chunk in "10"]
    whole = 2 * half + (0 if rank % 2 else 1)
    plain += ["B" + chunk for chunk in last[:whole]] + ["I" + chunk for chunk in last[whole:]]
    plain += ["I0"] * behind
    stages = {"0": rank, "1": 2 * num_ranks - 1 - rank}
    count: dict[str, int] = {}
    merged = []
    for word in plain:
        key = ("F" if word[0] == "F" else "B") + word[1]
        merged.append((word[0], (stages[word[1]], count.setdefault(key, 0))))
        count[key] += 1
    kept = [(kind, step) for kind, step in merged if step[1] < micro_batches]
    return _merged(kept, frozenset(step for kind, step in kept if kind == "B"))


def zigzag(stage: int, num_ranks: int) -> int:
    """The rank of a stage that goes down the ranks, then up, and so on."""
    wave, place = divmod(stage, num_ranks)
    return place if wave % 2 == 0 else num_ranks - 1 - place


def unfolded(folded: Schedule, micro_batches: int) -> Schedule:
    """Both directions of a V with two chunks: twice the ranks, as many stages, each on two ranks.

    Micro-batch j of the V is 2j on the way down and 2j + 1 on the way up; those from `micro_batches` on are dropped.
    """
    turn = len(folded.ranks)
    halves: list[list[tuple[PipeAction, ...]]] = []
    for mirrored in (False, True):
        half = []
        for actions in folded.ranks:
            renamed = [a._replace(micro_batch=2 * a.micro_batch + ((a.stage >= turn) != mirrored)) for a in actions]
            half.append(tuple(action for action in renamed if action.micro_batch < micro_batches))
        halves.append(half)
    return Schedule((*halves[0], *reversed(halves[1])))


def check_both_ways(num_ranks: int) -> None:
    """Raise ConfigurationError for ranks that have no mirror."""
    if num_ranks % 2:
        raise ConfigurationError(f"pipelines in both directions need an even number of ranks, not {num_ranks}")


def _merged(actions: Sequence[tuple[str, Step]], whole: frozenset[Step] = frozenset()) -> RankOrder:
    """Of one list with forwards and backwards."""
    before, backwards = [], 0
    for kind, _ in actions:
        if kind == "F":
            before.append(float(backwards))
        backwards += kind != "F"
    return RankOrder(
        forward=[step for kind, step in actions if kind == "F"],
        backward=[step for kind, step in actions if kind != "F"],
        before=before,
        whole=whole,
    )


def merged(actions: Sequence[tuple[str, Step]]) -> RankOrder:
    """The order of a rank from one list of ("F" or "B", step)."""
    return _merged(actions)


def _groups(micro_batches: int, num_ranks: int) -> list[range]:
    """Micro-batches in groups of about `num_ranks`, none smaller; what is left over makes groups longer."""
    rounds = max(1, micro_batches // num_ranks)
    bounds = [micro_batches * index // rounds for index in range(rounds + 1)]
    return [range(first, last) for first, last in itertools.pairwise(bounds)]
