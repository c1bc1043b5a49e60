"""Lost ranks: who is missing when a collective does not end, and the error that says so on every rank.

    RankLostError: rank 3 ended: reduce_scatter of head/linear#0/bwd over ranks 0, 1, 2, 3 does not end on rank 0 (...)

A rank knows which blocks did not come, which need not be whose fault: rank 2, which gives up because rank 3 is gone, is
missed by others in turn. So a rank that gives up tells the others what it waits for, in the store through which they
found each other, and reads what they tell. Who is waited for and tells nothing is lost; who tells is looked behind.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
import torch.distributed as dist

from autopar._compat import Store, default_store
from autopar.errors import AutoparError, RankLostError
from autopar.runtime.collectives.exchange import LostPeersError
from autopar.runtime.collectives.flight_record import RECORD
from autopar.runtime.collectives.progress import HERE

HEARING_SECONDS = 4.0
"""So long the others have to tell what they wait for: ranks see a lost one at different times."""
STORE_SECONDS = 2.0
"""So long the store may take beyond that; it may lie on the rank that is lost."""
POLL_SECONDS = 0.1
SHOWN_RANKS = 4
"""Of which an error says what they started last."""
KEY = "autopar/waiting/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A collective that a rank waits for: its kind, its operator, the ranks of its group and the own place in it."""

    kind: str
    operator: str
    ranks: tuple[int, ...]
    place: int

    @property
    def rank(self) -> int:
        """The rank that is waited for."""
        return self.ranks[self.place]

    def __str__(self) -> str:
        return f"{self.kind} of {self.operator}"


class Told(msgspec.Struct, frozen=True):
    """What a rank that gives up tells: who it waits for, in which operator, whether their connections are closed, and
    what it started last."""

    lost: tuple[int, ...]
    operator: str
    ended: bool
    last: tuple[str, ...] = ()


def lost_ranks(waiting: Waiting, error: LostPeersError) -> AutoparError:
    """The error of a rank whose collective failed: the heartbeat's verdict where there is one, else a RankLostError;
    takes up to `HEARING_SECONDS` to hear the others."""
    verdict = HERE.ask()
    if verdict is not None:
        return verdict
    mine = Told(tuple(waiting.ranks[place] for place in error.peers), str(waiting), error.ended, RECORD.last())
    told = _hear(waiting.rank, mine, error.ended)
    said = [f"last on rank {rank}: {', '.join(one.last)}" for rank, one in sorted({**told, waiting.rank: mine}.items())]
    return RankLostError(f"{message(waiting, mine, told, str(error))}; {RECORD.told(said[:SHOWN_RANKS])}")


def message(waiting: Waiting, mine: Told, told: Mapping[int, Told], cause: str) -> str:
    """What the error says. told: by rank, what the others told."""
    lost = behind(waiting.rank, mine.lost, told)
    # a rank that gave up has closed its connections too: only who misses the lost ones themselves knows about theirs
    ended = any(one.ended and not set(lost).isdisjoint(one.lost) for one in (mine, *told.values()))
    named, over = _named(lost), ", ".join(map(str, waiting.ranks))
    others = {rank: one for rank, one in told.items() if rank not in (waiting.rank, *lost)}
    waits = "; ".join(f"rank {rank} waits for {_named(one.lost)} in {one.operator}" for rank, one in others.items())
    if waiting.rank in lost:
        what = "came late, the others have given up" if len(lost) == 1 else "came late or their links stall"
    else:
        what = "ended" if ended else "is late or its link stalls" if len(lost) == 1 else "are late or their links stall"
    advice = (
        f"what stopped {'it' if len(lost) == 1 else 'them'} stands in the output of {named}"
        if ended and waiting.rank not in lost
        else "a rank that is only slow needs a larger timeout= of init_process_group"
    )
    return (
        f"{named} {what}: {mine.operator} over ranks {over} does not end on rank {waiting.rank}"
        f"{f' ({waits})' if waits else ''}; {advice} ({cause})"
    )


def behind(rank: int, lost: Collection[int], told: Mapping[int, Told]) -> tuple[int, ...]:
    """The ranks at the end of all chains of waiting that begin with `lost`: those that tell nothing. Where all tell
    something (a link stalls, and both its ends wait), the ones for which most ranks wait."""
    found: set[int] = set()
    seen, todo = {rank}, [one for one in lost if one != rank]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in told:
            todo += told[current].lost
        else:
            found.add(current)
    if found:
        return tuple(sorted(found))
    votes = Counter([*lost, *(one for other, said in told.items() if other != rank for one in said.lost)])
    return tuple(sorted(one for one, count in votes.items() if count == max(votes.values())))


def _named(ranks: Collection[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, sorted(ranks)))}"


def _hear(rank: int, mine: Told, ended: bool) -> dict[int, Told]:
    """Tell the others, and what they told within the time; nothing where the store does not answer. ended: the ranks
    that are lost have nothing more to tell."""
    told: dict[int, Told] = {}
    store, world = default_store(), dist.get_world_size()
    others = set(range(world)) - {rank}
    expected = others - set(mine.lost) if ended else others
    asked = threading.Thread(target=_ask, args=(store, rank, others, expected, mine, told), daemon=True)
    asked.start()
    asked.join(HEARING_SECONDS + STORE_SECONDS)
    return dict(told)


def _ask(store: Store, rank: int, others: set[int], expected: set[int], mine: Told, told: dict[int, Told]) -> None:
    """Fill `told` until all that are `expected` to tell something have, or the time is over, or the store fails."""
    deadline = time.monotonic() + HEARING_SECONDS
    try:
        store.set(f"{KEY}{rank}", msgspec.json.encode(mine).decode())
        while True:
            for other in sorted(others - set(told)):
                if store.check([f"{KEY}{other}"]):
                    told[other] = msgspec.json.decode(store.get(f"{KEY}{other}"), type=Told)
            if expected <= set(told) or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)
    except (RuntimeError, OSError):  # its host is gone: what came so far is all there is
        return
