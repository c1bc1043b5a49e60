"""Manifest: what a checkpoint holds, in one JSON file that is written last.

    {"content": {"format": 1, "step": 100, "tensors": {...}, "files": {...}, ...}, "sha256": "9f2c..."}

It names the folder of the tensors beside it, and every file there with its bytes and SHA-256 (as `sha256sum` prints
it), so the checkpoint is there as soon as the manifest is. The manifest holds its own checksum too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autopar.errors import ConfigurationError
from autopar.files import as_record

Content = TypeVar("Content")
FORMAT = 1
"""Of the manifests that this autopar writes, and the newest that it reads."""
MANIFEST = "manifest.json"
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """Global shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """Size in bytes and checksum of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """See the module docstring. plan: digest of the plan that the run had; groups: the parameters of each group of the
    optimizer, whose class is `optimizer` ("": none was saved); objects: names of values that are no tensors."""

    format: int
    autopar: str
    torch: str
    plan: str
    processes: int
    step: int
    folder: str
    optimizer: str
    groups: tuple[tuple[str, ...], ...]
    tensors: Mapping[str, TensorForm]
    objects: tuple[str, ...]
    files: Mapping[str, SavedFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sealed:
    content: dict[str, Any]
    sha256: str


def sealed(content: Any) -> bytes:
    """A dataclass as a JSON text with its checksum."""
    plain = msgspec.to_builtins(content)
    document = {"content": plain, "sha256": hashlib.sha256(_written(plain)).hexdigest()}
    return _written(document)


def unsealed(written: bytes, kind: type[Content], origin: str) -> Content:
    """The dataclass that `sealed` wrote. Raises ConfigurationError where any byte is another."""
    document = as_record(written, _Sealed, origin)
    if document.sha256 != hashlib.sha256(_written(document.content)).hexdigest() or written != _written(
        {"content": document.content, "sha256": document.sha256}
    ):
        raise ConfigurationError(f"{origin} is damaged: its content does not have the checksum that it names")
    version = document.content.get("format", FORMAT)
    if version != FORMAT:
        raise ConfigurationError(f"{origin} has format {version}, this autopar reads {FORMAT}: install a newer autopar")
    return as_record(_written(document.content), kind, origin)


def _written(plain: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plain), indent=1)


def saved_file(path: Path) -> SavedFile:
    """Size and checksum of the file as it is now. Raises OSError."""
    checksum, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            checksum.update(piece)
            size += len(piece)
    return SavedFile(bytes=size, sha256=checksum.hexdigest())
