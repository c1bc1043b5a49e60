"""Blocks of saved tensors: the bytes of a file that one block is made of, and no others.

    with BlockReader() as reader:
        block = reader.read(saved, [[(0, 512)], [(0, 4096)]])     # the runs of indices along every dim
        reader.bytes_read

Columns of a row-major tensor lie in as many ranges as there are rows. Ranges with less than a sector between them are
read together, since a call costs more than these bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from autopar.errors import ConfigurationError
from autopar.layouts.index_blocks import Runs
from autopar.runtime.weights.safetensors_file import SavedTensor

_SMALLEST_GAP = 512
"""Bytes between two ranges that are read rather than skipped."""
_MOST_AT_ONCE = 16 << 20
"""Bytes of one call, and about those of a span that is read for its parts."""


class BlockReader:
    """Reads blocks of tensors, each file opened once; a context manager. bytes_read: so far, headers not counted."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, saved: SavedTensor, runs: Sequence[Runs]) -> torch.Tensor:
        """The block of a tensor that consists of these runs along its dims, on the host and in the file's dtype.

        Raises ConfigurationError naming file and tensor where the system cannot read it.
        """
        shape = [sum(length for _, length in of_dim) for of_dim in runs]
        block = torch.empty(shape, dtype=saved.dtype)
        if block.numel():
            target = block.view(-1).view(torch.uint8).numpy()
            try:
                self._fill(target, saved, *byte_ranges(saved.shape, list(map(sorted, runs)), saved.dtype.itemsize))
            except (OSError, EOFError) as error:
                why = getattr(error, "strerror", None) or error
                raise ConfigurationError(f"cannot read {saved.file}, tensor {saved.name!r}: {why}") from error
        for dim, of_dim in enumerate(runs):
            block = _in_turn(block, dim, of_dim)
        return block

    def _fill(self, target: Any, saved: SavedTensor, starts: Any, lengths: Any) -> None:
        """Put the ranges of the file one behind the other into `target`."""
        file = self._files.get(saved.file)
        if file is None:
            file = self._files[saved.file] = saved.file.open("rb", buffering=0)
        filled = 0
        for first, last in _neighbours(starts, lengths):
            begin, end = int(starts[first]), int(starts[last - 1] + lengths[last - 1])
            held = int(lengths[first:last].sum())
            into = target[filled : filled + held]
            if held == end - begin:
                self._read_at(file, saved.start + begin, into)
            else:
                span = np.empty(end - begin, dtype=np.uint8)
                self._read_at(file, saved.start + begin, span)
                _pack(span, into, starts[first:last] - begin, lengths[first:last])
            filled += held

    def _read_at(self, file: BinaryIO, start: int, into: Any) -> None:
        file.seek(start)
        view, done = memoryview(into), 0
        while done < len(view):
            count = file.readinto(view[done : done + _MOST_AT_ONCE])  # type: ignore[attr-defined]  # a raw file has it
            if not count:
                raise EOFError(
                    f"it ends at byte {start + done:,}, and was longer when its header was read; copy it again"
                )
            done += count
        self.bytes_read += done


def _in_turn(block: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    """A block whose runs along a dim ascend, with these in their own order."""
    if list(runs) == sorted(runs):
        return block
    ascending = sorted(runs)
    lengths = [length for _, length in ascending]
    pieces = dict(zip(ascending, torch.split_with_sizes(block, lengths, dim), strict=True))
    return torch.cat([pieces[run] for run in runs], dim)


def byte_ranges(shape: Sequence[int], runs: Sequence[Runs], itemsize: int) -> tuple[Any, Any]:
    """(starts, lengths): the ranges of bytes, ascending, that hold a block of a row-major tensor; arrays of int64."""
    cut = max((dim for dim, of_dim in enumerate(runs) if list(of_dim) != [(0, shape[dim])]), default=None)
    if cut is None:
        return np.zeros(1, np.int64), np.full(1, math.prod(shape) * itemsize, np.int64)
    inside = math.prod(shape[cut + 1 :]) * itemsize
    starts = np.array([start * inside for start, _ in runs[cut]], np.int64)
    lengths = np.array([length * inside for _, length in runs[cut]], np.int64)
    for dim in reversed(range(cut)):
        stride = math.prod(shape[dim + 1 :]) * itemsize
        indices = np.concatenate([np.arange(start, start + length) for start, length in runs[dim]])
        starts = (indices[:, None] * stride + starts[None, :]).ravel()
        lengths = np.tile(lengths, len(indices))
    return starts, lengths


def _neighbours(starts: Any, lengths: Any) -> Iterator[tuple[int, int]]:
    """(first, last) of the ranges that are read together: with small gaps between them, up to a bound."""
    gaps = starts[1:] - (starts + lengths)[:-1]
    wide = np.flatnonzero(gaps >= _SMALLEST_GAP) + 1
    far = np.flatnonzero(np.diff(starts // _MOST_AT_ONCE)) + 1
    edges = [0, *np.union1d(wide, far).tolist(), len(starts)]
    yield from itertools.pairwise(edges)


def _pack(span: Any, into: Any, starts: Any, lengths: Any) -> None:
    filled = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        into[filled : filled + length] = span[start : start + length]
        filled += length
