"""Communicator: one process group as the collectives of `host_collectives.py` see it.

    communicator = communicator_of("7")              # the group of this name: one communicator for all graphs
    communicator.inside, communicator.across         # group of 2 nodes x 2 ranks, on rank 0: (0, 1), (0, 2)

A collective takes tags of its own from it when it starts, which every rank of the group does in one order. What has to
go on when a round of its exchanges is through runs in the communicator's thread for that round, one collective after
the other: with one thread for all rounds, a collective waited until the one before it had ended (eight all_reduces of
256 KiB on 2 x 2 ranks of 0.3 cores that compute: 52 ms each, 17 so).
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from autopar._compat import default_timeout, resolve_group
from autopar.hardware.cluster import nodes_of_job
from autopar.runtime.collectives.exchange import Exchange

Calls: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
"""None ends the thread that works them off."""

FIRST_TAG, NUM_TAGS, TAGS_OF_A_COLLECTIVE = 1 << 20, 1 << 20, 4
"""Messages of users and of pipelines have small tags."""


class Communicator:
    """The ranks of one group, how they lie on nodes, and the order of their collectives."""

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int) -> None:
        """ranks_per_node: of the job, whose rank r is on node r // ranks_per_node."""
        self._group = weakref.ref(group)
        self.size, self.place = group.size(), group.rank()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.timeout: timedelta = default_timeout()
        self.speaks_gloo = "cpu:gloo" in dist.get_backend_config(group)
        self.waited_seconds = 0.0
        self._collectives = itertools.count()
        self._queues: dict[int, Calls] = {}
        nodes = [rank // ranks_per_node for rank in self.ranks]
        mine = nodes[self.place]
        self.inside = tuple(place for place, node in enumerate(nodes) if node == mine)
        turn = self.inside.index(self.place)
        places = [[place for place, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)]
        self.is_regular = len({len(own) for own in places}) == 1 and nodes == sorted(nodes)
        self.across = tuple(own[turn] for own in places) if self.is_regular else ()

    @property
    def everyone(self) -> tuple[int, ...]:
        """All places of the group."""
        return tuple(range(self.size))

    @property
    def num_nodes(self) -> int:
        """Nodes of the group, if all have equally many of its ranks; else 1: it is taken for flat."""
        return len(self.across) if self.is_regular else 1

    def first_tag(self) -> int:
        """The first of the tags of a collective that starts now."""
        return FIRST_TAG + next(self._collectives) * TAGS_OF_A_COLLECTIVE % NUM_TAGS

    def exchange(self, tag: int, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> Exchange:
        """Post blocks to and from other places, the next one first, so that not all ranks send to one."""
        group = self._group()
        assert group is not None, "the process group of a collective is gone"
        ahead = [(self.place + step) % self.size for step in range(1, self.size)]
        return Exchange(
            group,
            tag,
            sent={place: sent[place] for place in ahead if place in sent},
            received={place: received[place] for place in reversed(ahead) if place in received},
        )

    def later(self, number: int, call: Callable[[], None]) -> None:
        """Run `call`, which does not raise, in this communicator's thread of that number, behind what it was given
        before. A thread starts with the first of it, and ends with this communicator."""
        if number not in self._queues:
            made: Calls = queue.SimpleQueue()
            name = f"autopar-collectives-{number}"
            threading.Thread(target=_work_off, args=(made,), name=name, daemon=True).start()
            weakref.finalize(self, made.put, None)
            self._queues[number] = made
        self._queues[number].put(call)


def _work_off(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # not held until the next one comes


_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
"""Beside torch's own table of groups: all graphs that use a group must take tags from one counter."""


def communicator_of(group_name: str) -> Communicator:
    """The communicator of the process group of this name."""
    group = resolve_group(group_name)
    found = _communicators.get(group)
    if found is None:
        world = dist.get_world_size()
        found = _communicators[group] = Communicator(group, world // nodes_of_job(world))
    return found


def waited_seconds() -> float:
    """Seconds in which this process has waited for collectives of CPU tensors so far."""
    return sum(communicator.waited_seconds for communicator in list(_communicators.values()))
