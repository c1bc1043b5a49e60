"""Exchange: blocks that ranks of a group send each other, all of them at once and without a thread of their own.

    exchange = Exchange(group, tag, sent={1: a, 2: b}, received={1: c, 2: d})     # posted; gloo moves them
    exchange.wait(timeout)                       # whenever: c and d are there, a and b may change

Receives are posted before sends: gloo tells a sender over the same connection that its peer is ready, and behind a
send that message would wait. No rank waits before it has posted everything, so none can lock another. `tag` tells
exchanges apart that are on their way at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

AFTER_A_LOSS = timedelta(milliseconds=200)
"""Once a peer is lost, so long is waited for each other one: it tells who else is."""
_LATE = ("timed out", "timeout")


class LostPeersError(Exception):
    """Peers (ranks of the group) whose blocks did not come or did not go. ended: their connection is closed; else they
    are late. Never seen by users: `lost_ranks.py` turns it into a RankLostError."""

    def __init__(self, peers: Sequence[int], ended: bool, cause: str) -> None:
        super().__init__(cause)
        self.peers, self.ended = tuple(peers), ended


class Exchange:
    """See the module docstring. Blocks are contiguous; empty ones are not sent, and both sides know that."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        *,
        sent: Mapping[int, torch.Tensor],
        received: Mapping[int, torch.Tensor],
    ) -> None:
        """Peers are ranks of the group, in the order in which their blocks are posted.

        Raises LostPeersError where the connection to one is closed.
        """
        self._blocks = (sent, received)  # gloo reads and writes them; they live until all of it is done
        self._works: list[tuple[int, dist.Work]] = []
        for blocks, post in ((received, group.recv), (sent, group.send)):
            for peer, block in blocks.items():
                if block.numel():
                    try:
                        self._works.append((peer, post([block], peer, tag)))
                    except RuntimeError as error:
                        raise LostPeersError([peer], True, _first_line(error)) from error

    def wait(self, timeout: timedelta) -> None:
        """Until all blocks have come and gone. Raises LostPeersError that names every peer for which they have not."""
        deadline = time.monotonic() + timeout.total_seconds()
        lost: dict[int, RuntimeError] = {}
        for peer, work in self._works:
            left = timedelta(seconds=max(deadline - time.monotonic(), 1e-3))
            try:
                work.wait(min(left, AFTER_A_LOSS) if lost else left)
            except RuntimeError as error:
                lost.setdefault(peer, error)
        if lost:
            ended = [peer for peer, error in lost.items() if not _is_late(error)]
            peers = ended or list(lost)
            raise LostPeersError(peers, bool(ended), _first_line(lost[peers[0]])) from lost[peers[0]]


def _is_late(error: RuntimeError) -> bool:
    return any(word in str(error).lower() for word in _LATE)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
