"""Memory and streams that stand for those of CUDA: pages that nobody pins, copies that happen when they are awaited."""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Pages:
    """Says what was allocated and released."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.released: list[int] = []

    def allocate(self, nbytes: int) -> mmap.mmap:
        self.allocated.append(nbytes)
        return mmap.mmap(-1, nbytes)

    def release(self, memory: mmap.mmap) -> None:
        self.released.append(len(memory))


class LateCopy:
    """A copy that happens when someone waits for it, with those before it on its stream; it keeps no tensor alive."""

    def __init__(self, target: Tensor, source: Tensor, direction: str, after: Any, before: LateCopy | None) -> None:
        self.target, self.source = weakref.ref(target), weakref.ref(source)
        self.direction, self.after, self.before = direction, after, before
        self.writes = target.data_ptr()
        self.ended = False

    def synchronize(self) -> None:
        if not self.ended:
            for one in (self.before, self.after):
                if one is not None:
                    one.synchronize()
            target, source = self.target(), self.source()
            assert target is not None, "what is copied to is gone"
            assert source is not None, "what is copied is gone"
            target.copy_(source)
            self.ended = True


@dataclass
class LateStreams:
    """Two streams, whose copies are as late as they may be."""

    started: list[LateCopy] = field(default_factory=list)

    def start(self, direction: str, device: torch.device, target: Tensor, source: Tensor, after: Any) -> LateCopy:
        before = next((copy for copy in reversed(self.started) if copy.direction == direction), None)
        self.started.append(LateCopy(target, source, direction, after, before))
        return self.started[-1]

    def wait(self, device: torch.device, event: Any) -> None:
        event.synchronize()
