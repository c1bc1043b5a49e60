"""Safetensors files: the header of a file, checked, and the bytes of one block of a tensor in it.

    saved = read_header(Path("model.safetensors"))["model.norm.weight"]
    with BlockReader() as reader:
        block = reader.read(saved, [[(0, 512)], [(0, 4096)]])     # the runs of indices along every dim
        reader.bytes_read

A file is 8 bytes that count those of its header, a JSON header (name -> dtype, shape, begin and end of its bytes), and
the bytes of all tensors, row-major and without holes. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch

from autopar.errors import ConfigurationError
from autopar.files import MOST_BYTES, decoded_json

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "C64": torch.complex64,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""The words of the format, and torch's."""

LENGTH_BYTES = 8
METADATA = "__metadata__"
_SMALLEST_GAP = 4096
"""Bytes between two ranges that are read rather than skipped: a page, which the system reads anyway."""
_MOST_AT_ONCE = 16 << 20

Runs: TypeAlias = Sequence[tuple[int, int]]
"""(start, length) of indices along a dim, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor in a file. start: its first byte, from the beginning of the file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, SavedTensor]:
    """The tensors of a file by name. Raises ConfigurationError, naming file and tensor, for a file that is none, was cut
    off, or whose header and size disagree."""
    try:
        with path.open("rb") as file:
            total = path.stat().st_size
            begin, entries = _entries(path, file, total)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error
    found = {name: _tensor(path, name, entry, begin, total) for name, entry in entries.items() if name != METADATA}
    _check_holes(path, found, begin, total)
    return found


def _entries(path: Path, file: BinaryIO, total: int) -> tuple[int, dict[str, Any]]:
    """(first byte behind the header, the header)."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if total < LENGTH_BYTES or length > min(total - LENGTH_BYTES, MOST_BYTES):
        raise ConfigurationError(
            f"{path} is no safetensors file, or was cut off: it has {total:,} bytes, and its first {LENGTH_BYTES} speak of "
            f"a header of {length:,}"
        )
    entries = decoded_json(file.read(length), f"the header of {path}")
    if not isinstance(entries, dict):
        raise ConfigurationError(f"the header of {path} is damaged: it is no JSON object")
    return LENGTH_BYTES + length, entries


def _tensor(path: Path, name: str, entry: Any, begin: int, total: int) -> SavedTensor:
    where = f"{path}, tensor {name!r}"
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise ConfigurationError(f"{where}: its entry in the header is damaged (dtype, shape, data_offsets): {entry!r}")
    if dtype not in DTYPES:
        raise ConfigurationError(f"{where} has the dtype {dtype}; autopar reads {', '.join(DTYPES)}")
    saved = SavedTensor(file=path, name=name, dtype=DTYPES[dtype], shape=tuple(shape), start=begin + offsets[0])
    if offsets[1] - offsets[0] != saved.size:
        raise ConfigurationError(
            f"{where}: {dtype} {list(shape)} takes {saved.size:,} bytes, its offsets {offsets} hold "
            f"{offsets[1] - offsets[0]:,}: the header is damaged"
        )
    if saved.start + saved.size > total:
        raise ConfigurationError(
            f"{where} ends at byte {saved.start + saved.size:,}, the file has {total:,}: it was cut off; copy it again"
        )
    return saved


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _check_holes(path: Path, found: Mapping[str, SavedTensor], begin: int, total: int) -> None:
    end = begin
    for saved in sorted(found.values(), key=lambda each: (each.start, each.size)):
        if saved.start != end:
            what = "overlaps the one before it" if saved.start < end else f"leaves {saved.start - end:,} bytes before it"
            raise ConfigurationError(f"{path}, tensor {saved.name!r} {what}: the header is damaged")
        end = saved.start + saved.size
    if end != total:
        raise ConfigurationError(f"{path} has {total - end:,} bytes behind its last tensor: the file is damaged")


class BlockReader:
    """Reads blocks of tensors, each file opened once; a context manager. bytes_read: so far, headers not counted."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
                self._fill(target, saved, *byte_ranges(saved.shape, runs, saved.dtype.itemsize))
            except (OSError, EOFError) as error:
                why = getattr(error, "strerror", None) or error
                raise ConfigurationError(f"cannot read {saved.file}, tensor {saved.name!r}: {why}") from error
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
                raise EOFError(f"the file ends at byte {start + done:,}; it was {start + len(view):,} when it was opened")
            done += count
        self.bytes_read += done


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
