"""Files of tensors: those of torch.distributed.checkpoint, read as data.

    write_tensors({"model.0.weight": tensor, "extra.epoch": 3}, folder)     # every rank its blocks, each block once
    read_tensors(state, folder, read_metadata(folder))                     # into the tensors of `state`, any layout

Tensors in strided layouts (fused q|k|v over tensor-parallel ranks) are written and read as `strided_chunks`. The index
is a pickle, and so are values that are no tensors: the index may only name what such an index consists of, and values
are read with `weights_only`.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from autopar.errors import ConfigurationError
from autopar.runtime.consensus import exchanging

State = dict[str, Any]
"""Name -> tensor, DTensor or plain data."""
INDEX = ".metadata"
AS_THEY_ARE = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
"""Names and values: torch would go through what users keep, and make words of keys that are numbers."""
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}


def write_tensors(state: State, folder: Path) -> Metadata:
    """Write the state of all ranks to the empty `folder` and flush it to the disk; every rank gets the index.

    Raises ConfigurationError on every rank where one could not write, RankLostError where one has ended.
    """
    try:
        with _quiet_alone(), exchanging(f"what each rank writes to {folder}"):
            index: Metadata = state_dict_saver.save(
                state,
                storage_writer=FileSystemWriter(folder),
                planner=DefaultSavePlanner(**AS_THEY_ARE),
            )
    except (OSError, RuntimeError, CheckpointException) as error:
        raise ConfigurationError(f"cannot write {folder}: {_first_cause(error)}") from error
    return index


def read_metadata(folder: Path) -> Metadata:
    """The index of the blocks in `folder`. Raises ConfigurationError for a file that is none, or not there."""
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _IndexReader(file).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ConfigurationError(f"{path} is no index of a checkpoint: {_first_cause(error)}") from error
    if not isinstance(index, Metadata):
        raise ConfigurationError(f"{path} is no index of a checkpoint: it holds a {type(index).__name__}")
    return index


def read_tensors(state: State, folder: Path, index: Metadata) -> None:
    """Fill the tensors of `state`, and replace its other values. Raises ConfigurationError on every rank where one
    could not read, RankLostError where one has ended."""
    try:
        with _quiet_alone(), exchanging(f"what each rank reads from {folder}"):
            state_dict_loader.load(state, storage_reader=_Reader(folder, index), planner=_DataPlanner())
    except (OSError, RuntimeError, CheckpointException) as error:
        raise ConfigurationError(f"cannot read {folder}: {_first_cause(error)}") from error


@contextlib.contextmanager
def _quiet_alone() -> Iterator[None]:
    """torch warns that one process without a group writes and reads alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def is_plain(value: Any) -> bool:
    """Whether the value can be written, and read back as data."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        _read_plain(stream)
    except Exception:  # whatever a user's class raises
        return False
    return True


def _read_plain(stream: io.BytesIO) -> Any:
    return torch.load(stream, map_location="cpu", weights_only=True)


def _first_cause(error: BaseException) -> str:
    """What one rank said, without the traces that torch puts around it."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {_first_cause(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class _IndexReader(pickle.Unpickler):
    """Of an index: a pickle that names anything else is not followed."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if module.startswith("pathlib"):
            return PurePosixPath
        known = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        if not known and name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index does")
        found: Callable[..., Any] = super().find_class(module, name)
        return found


class _Reader(FileSystemReader):
    """Of files whose index was read before."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._index


class _DataPlanner(DefaultLoadPlanner):
    """Reads values that are no tensors as data."""

    def __init__(self) -> None:
        super().__init__(**AS_THEY_ARE)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = _read_plain(value)
