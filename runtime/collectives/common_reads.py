"""Common reads: a value that lies across ranks is read by all of them, or by none.

    read_together("the output logits of train call 7", (0, 1))
        both ranks     they go on, to gather it
        one rank       RankMismatchError behind 5 s, on that rank; the other one is not disturbed

Who reads `out.logits` does not see that he starts a collective. So ranks first meet in the job's store, where a rank
that waits alone can go away again; in the collective itself it would wait for the others' next one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from autopar._compat import Store, store_connection
from autopar.errors import RankMismatchError
from autopar.runtime.collectives.progress import HERE

READ_SECONDS = 5.0
"""So long a rank waits for the others. `module.full(...)` waits as every collective does."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.05
_MET = "met"


def read_together(what: str, ranks: Sequence[int]) -> None:
    """Wait until all `ranks` read `what`. Raises RankMismatchError where one does not within `READ_SECONDS`, or reads
    something else."""
    if len(ranks) < 2:
        return
    with HERE.inside("read"):
        world = dist.group.WORLD
        assert world is not None
        if world not in _reads:
            _reads[world] = CommonReads(store_connection("autopar/reads"))
        _reads[world].meet(what, ranks)


class CommonReads:
    """The reads of this process. store: of the job."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers: dict[str, int] = {}
        self._last: dict[str, str] = {}

    def meet(self, what: str, ranks: Sequence[int]) -> None:
        """As `read_together`."""
        place = ",".join(map(str, ranks))
        while True:
            number = self._numbers[place] = self._numbers.get(place, 0) + 1
            key = f"{place}/{number}"
            if not self._store.check([f"{key}/end"]):  # else others gave it up before this rank came
                break
        end = self._end(key, what, len(ranks))
        if end != _MET:
            raise RankMismatchError(end)
        self._last[place] = key

    def _end(self, key: str, what: str, count: int) -> str:
        """How the read ends, the same on all ranks: `_MET`, or what was wrong."""
        store, deadline = self._store, time.monotonic() + READ_SECONDS
        first = store.compare_set(f"{key}/what", "", what).decode()
        if first != what:
            return self._decide(key, f"rank {dist.get_rank()} reads {what}, where other ranks read {first}; {_ADVICE}")
        if store.add(f"{key}/count", 1) == count:
            self._forget(self._last.get(key.partition("/")[0]))
            return self._decide(key, _MET)
        pause = _FIRST_PAUSE
        while not store.check([f"{key}/end"]):
            if time.monotonic() > deadline:
                came = store.add(f"{key}/count", 0)
                who = f"{came} of {count} ranks, among them {dist.get_rank()},"
                return self._decide(key, f"{who} read {what} within {READ_SECONDS:g} s; {_ADVICE}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return store.get(f"{key}/end").decode()

    def _decide(self, key: str, end: str) -> str:
        """The first decision stands."""
        return self._store.compare_set(f"{key}/end", "", end).decode()

    def _forget(self, key: str | None) -> None:
        """The keys of a read that all ranks have left behind, since they are at the next one."""
        for name in () if key is None else ("what", "count", "end"):
            self._store.delete_key(f"{key}/{name}")


_ADVICE = (
    "each rank holds a part of it, so all of them read it, at the same place: write whole = module.full(...) on all "
    "ranks, which waits for slow ones, and use that where you like"
)
_reads: weakref.WeakKeyDictionary[dist.ProcessGroup, CommonReads] = weakref.WeakKeyDictionary()
