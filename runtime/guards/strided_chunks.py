"""Strided chunks: blocks that are not contiguous, as torch.distributed.checkpoint writes and reads them.

    12 rows in S(0, split=3) over two ranks     rank 0 holds rows 0-1, 4-5, 8-9: three chunks, views of its block

torch takes what a rank holds for one box, and refuses the overlapping boxes of such layouts. The three methods by which
it asks a DTensor for its chunks are put right for every DTensor of the process, so `dcp.save(module.state_dict())` and
the checkpoints of torchtitan work as they are. No rank gathers or copies anything; the files are torch's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from autopar._compat import StridedShard
from autopar.layouts.ordered_shards import order_behind
from autopar.runtime.parameters import held_runs, local_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of the whole tensor, by its offsets, and the view of the rank's block that holds it."""

    offsets: tuple[int, ...]
    values: torch.Tensor


@functools.cache
def checkpoint_strided_blocks() -> None:
    """From now on, in this process. What torch makes of the one box is the form of what each chunk becomes."""
    write_items, chunk_list, tensor_shard = (
        DTensor.__create_write_items__,
        DTensor.__create_chunk_list__,
        DTensor.__get_tensor_shard__,
    )

    def of_writes(self: DTensor, name: str, value: Any) -> Any:
        items = write_items(self, name, value)
        return [_item(items[0], chunk) for chunk in chunks(self)] if _is_in_chunks(self) else items

    def of_chunks(self: DTensor) -> Any:
        boxes = chunk_list(self)  # type: ignore[no-untyped-call]  # DTensor's has no types
        return [_box(boxes[0], chunk) for chunk in chunks(self)] if _is_in_chunks(self) else boxes

    def of_values(self: DTensor, index: Any) -> Any:
        if _is_in_chunks(self):
            return _values_at(self, index.offset)
        return tensor_shard(self, index)  # type: ignore[no-untyped-call]  # as above

    for name, method in (
        ("__create_write_items__", of_writes),
        ("__create_chunk_list__", of_chunks),
        ("__get_tensor_shard__", of_values),
    ):
        setattr(DTensor, name, method)


def _is_in_chunks(tensor: DTensor) -> bool:
    """Whether blocks are strided and divide evenly, as those of a plan do; torch's own strided layouts, of FSDP over
    tensor parallelism, may be uneven, are boxes, and stay torch's."""
    dims = {placement.dim for placement in tensor.placements if isinstance(placement, StridedShard)}
    return bool(dims) and all(_divides_evenly(tensor, dim) for dim in dims)


def _divides_evenly(tensor: DTensor, dim: int) -> bool:
    size = tensor.shape[dim]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, StridedShard | TorchShard) and placement.dim == dim:
            ranks = tensor.device_mesh.size(axis)
            pieces = 1 if order_behind(placement) else int(getattr(placement, "split_factor", 1))
            if size % (ranks * pieces):
                return False
            size //= ranks
    return True


def chunks(tensor: DTensor) -> list[Chunk]:
    """The boxes of the whole tensor that this rank's block consists of."""
    block = local_tensor(tensor)
    found = []
    for runs in itertools.product(*(held_runs(tensor, dim) for dim in range(tensor.dim()))):
        values = block
        for dim, run in enumerate(runs):
            values = values.narrow(dim, run.inside, run.length)
        found.append(Chunk(offsets=tuple(run.start for run in runs), values=values))
    return found


def _box(box: Any, chunk: Chunk) -> Any:
    return replace(box, offsets=torch.Size(chunk.offsets), sizes=chunk.values.size())


def _item(item: Any, chunk: Chunk) -> Any:
    data = replace(item.tensor_data, chunk=_box(item.tensor_data.chunk, chunk))
    return replace(item, index=replace(item.index, offset=torch.Size(chunk.offsets)), tensor_data=data)


def _values_at(tensor: DTensor, offsets: Sequence[int]) -> torch.Tensor:
    """The view of the block that begins at these offsets, to be written or to be read into."""
    return next(chunk.values for chunk in chunks(tensor) if chunk.offsets == tuple(offsets))
