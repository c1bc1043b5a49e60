"""Safetensors files: the header of a file, read and checked, or written.

    read_header(Path("model.safetensors"))["model.norm.weight"]     # dtype, shape, and where its bytes begin
    header_bytes([TensorForm(name="w", dtype=torch.float32, shape=(2, 3))])

A file is 8 bytes that count those of its header, a JSON header (name -> dtype, shape, begin and end of its bytes), and
the bytes of all tensors, row-major and without holes. https://github.com/huggingface/safetensors#format

The package of that name (0.8) is not used. It maps files into memory: what a rank has read cannot be counted, mapped
pages count as its memory, and a file that shrinks meanwhile kills the process. Its `backend="pread"` reads the whole
tensor for a slice (measured: 128 MiB for a block of 32). It writes a file from tensors that are all in memory; here
they come one by one.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch

from autopar.errors import ConfigurationError
from autopar.files import MOST_BYTES, decoded_json, refuse_other_nodes

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
WRITTEN_METADATA = {"format": "pt"}
"""Without it transformers reads no file."""
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """What a header says of a tensor, but for its place."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor(TensorForm):
    """A tensor in a file. start: its first byte, from the beginning of the file."""

    file: Path
    start: int


def header_bytes(forms: Sequence[TensorForm]) -> bytes:
    """The beginning of a file whose tensors follow in this order. Raises ConfigurationError for a dtype that the format
    has no word for."""
    words = {dtype: word for word, dtype in DTYPES.items()}
    entries: dict[str, Any] = {METADATA: WRITTEN_METADATA}
    end = 0
    for form in forms:
        if form.dtype not in words:
            raise ConfigurationError(f"{form.name} is {form.dtype}, which no safetensors file holds; convert it first")
        offsets = [end, end := end + form.size]
        entries[form.name] = {"dtype": words[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(path: Path) -> dict[str, SavedTensor]:
    """The tensors of a file by name. Raises ConfigurationError, naming file and tensor, for a file that is none, was
    cut off, or whose header and size disagree."""
    refuse_other_nodes(path)
    try:
        with path.open("rb") as file:
            total = path.stat().st_size
            begin, entries = _entries(path, file, total)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}; copy it again") from error
    found = {name: _tensor(path, name, entry, begin, total) for name, entry in entries.items() if name != METADATA}
    _check_holes(path, found, begin, total)
    return found


def _entries(path: Path, file: BinaryIO, total: int) -> tuple[int, dict[str, Any]]:
    """(first byte behind the header, the header)."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if total < LENGTH_BYTES or length > min(total - LENGTH_BYTES, MOST_BYTES):
        raise ConfigurationError(
            f"{path} is no safetensors file, or was cut off: it has {total:,} bytes, and its first {LENGTH_BYTES} "
            f"speak of a header of {length:,}; copy it again"
        )
    entries = decoded_json(file.read(length), f"the header of {path}")
    if not isinstance(entries, dict):
        raise ConfigurationError(f"the header of {path} is damaged: it is no JSON object; copy it again")
    return LENGTH_BYTES + length, entries


def _tensor(path: Path, name: str, entry: Any, begin: int, total: int) -> SavedTensor:
    where = f"{path}, tensor {name!r}"
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ConfigurationError(
            f"{where}: its entry in the header is damaged (dtype, shape, data_offsets): {reprlib.repr(entry)}; copy it "
            "again"
        )
    if dtype not in DTYPES:
        raise ConfigurationError(f"{where} has the dtype {dtype}; autopar reads {', '.join(DTYPES)}")
    saved = SavedTensor(file=path, name=name, dtype=DTYPES[dtype], shape=tuple(shape), start=begin + offsets[0])
    if offsets[1] - offsets[0] != saved.size:
        raise ConfigurationError(
            f"{where}: {dtype} {list(shape)} takes {saved.size:,} bytes, its offsets {offsets} hold "
            f"{offsets[1] - offsets[0]:,}: the header is damaged; copy it again"
        )
    if saved.start + saved.size > total:
        raise ConfigurationError(
            f"{where} ends at byte {saved.start + saved.size:,}, the file has {total:,}: it was cut off; copy it again"
        )
    return saved


def _counts(value: Any) -> list[int] | None:
    """A list of numbers of things; None for anything else."""
    return value if isinstance(value, list) and all(type(each) is int and each >= 0 for each in value) else None


def _check_holes(path: Path, found: Mapping[str, SavedTensor], begin: int, total: int) -> None:
    end = begin
    for saved in sorted(found.values(), key=lambda each: (each.start, each.size)):
        if saved.start != end:
            free = saved.start - end
            what = "overlaps the one before it" if free < 0 else f"leaves {free:,} bytes before it"
            raise ConfigurationError(f"{path}, tensor {saved.name!r} {what}: the header is damaged; copy it again")
        end = saved.start + saved.size
    if end != total:
        raise ConfigurationError(
            f"{path} has {total - end:,} bytes behind its last tensor: it is damaged; copy it again"
        )
