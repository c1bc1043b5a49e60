"""Staged copy: what a checkpoint holds of this rank, copied to memory of the host that the writer's process maps, too.

    arena = Arena(staged_bytes(plan.items))
    places = arena.fill(plan.items, planner)     # from here on training may change every tensor

Only what this rank writes is copied: of what several ranks hold, torch.distributed.checkpoint gives every block to one.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from autopar.errors import ConfigurationError
from autopar.runtime.checkpoints.tensor_files import AS_THEY_ARE, State
from autopar.runtime.consensus import attempt_on_all, gather_from_all
from autopar.runtime.process_groups import rank

_ALIGNED = 64
"""Bytes to which every tensor is aligned."""
_SHARED = Path("/dev/shm")
"""Where files are memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies in an arena."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """Who writes what. plans: of all ranks; metadata: the index, without places in files."""

    plans: tuple[SavePlan, ...]
    metadata: Metadata
    planner: DefaultSavePlanner

    @property
    def mine(self) -> SavePlan:
        """What this rank writes."""
        return self.plans[rank()]


def planned_save(state: State) -> PlannedSave:
    """What each rank writes of the state of all, every block once; all ranks call it."""
    planner = DefaultSavePlanner(**AS_THEY_ARE)

    def local() -> SavePlan:
        planner.set_up_planner(state, None, rank() == 0)
        return planner.create_local_plan()

    plans = gather_from_all(attempt_on_all(local, "what each rank saves"), "what each rank saves")
    found, metadata = attempt_on_all(lambda: planner.create_global_plan(plans), "who saves what")
    planner.finish_plan(found[rank()])
    return PlannedSave(
        plans=tuple(FileSystemWriter("").prepare_global_plan(found)), metadata=metadata, planner=planner
    )


class Arena:
    """Shared memory of the host without a name: it goes with the last process that maps it, however that ends. path:
    where another process finds it, while this one runs. Raises ConfigurationError where the host does not have it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, _ALIGNED)
        self._handle = self._made()
        self.path = f"/proc/{os.getpid()}/fd/{self._handle}"
        weakref.finalize(self, os.close, self._handle)
        self._memory = torch.from_file(self.path, shared=True, size=self.nbytes, dtype=torch.uint8)

    def _made(self) -> int:
        has_room = _SHARED.is_dir() and shutil.disk_usage(_SHARED).free > self.nbytes
        folder = _SHARED if has_room else Path(tempfile.gettempdir())
        try:
            handle, name = tempfile.mkstemp(prefix="autopar-staged-", dir=folder)
            os.unlink(name)
            try:
                os.posix_fallocate(handle, 0, self.nbytes)  # what is not there is an error here, and no signal later
            except OSError:
                os.close(handle)
                raise
        except OSError as error:
            raise ConfigurationError(
                f"no {self.nbytes:,} bytes in {folder} for the copy that is written in the background "
                f"({error.strerror or error}): make room, or use autopar.save, which writes from the tensors themselves"
            ) from error
        return handle

    def fill(self, items: Sequence[WriteItem], planner: DefaultSavePlanner) -> tuple[Place | bytes, ...]:
        """Copy the values of items; returns where they lie, and the bytes of what is no tensor."""
        begin, places = 0, list[Place | bytes]()
        for item in items:
            value = planner.resolve_data(item)
            if not isinstance(value, torch.Tensor):
                places.append(value.getvalue())
                continue
            place = Place(begin=begin, shape=tuple(value.shape), dtype=value.dtype)
            tensor_at(self._memory, place).copy_(value.detach())
            places.append(place)
            begin += _aligned(place)
        return tuple(places)


def tensor_at(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor that lies at a place of an arena."""
    nbytes = math.prod(place.shape) * place.dtype.itemsize
    return memory[place.begin : place.begin + nbytes].view(place.dtype).view(place.shape)


def _aligned(place: Place) -> int:
    nbytes = math.prod(place.shape) * place.dtype.itemsize
    return -(-nbytes // _ALIGNED) * _ALIGNED


def staged_bytes(items: Sequence[WriteItem]) -> int:
    """How large an arena the tensors of items need."""
    data = [item.tensor_data for item in items if item.tensor_data is not None]
    return sum(_aligned(Place(begin=0, shape=tuple(d.chunk.sizes), dtype=d.properties.dtype)) for d in data)
