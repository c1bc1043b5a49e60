"""Written weights: the tensors of all ranks as a folder of safetensors files, of which no process holds more than one.

    save_weights(module.original, module.absent, Path("out"), device, most_bytes=5e9)     # all ranks call it

Rank 0 writes. Names, shapes and sizes are known before, so files are cut and their headers written first; then one
tensor after the other is gathered and appended. All is written into a folder beside, flushed, and moved to its place at
the end. Where files of several shards replace others, their index is taken away first: a save that is killed then
leaves a folder that nobody reads, and never a mix of two models.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from autopar.errors import ConfigurationError
from autopar.files import sync_folder
from autopar.runtime.consensus import attempt_on_all, from_first_rank
from autopar.runtime.process_groups import rank
from autopar.runtime.weights.found_weights import WantedTensor, wanted_tensors
from autopar.runtime.weights.safetensors_file import TensorForm, header_bytes
from autopar.runtime.weights.weight_files import INDEX_FILE, ONE_FILE, WEIGHT_MAP
from autopar.runtime.weights.whole_weights import whole_tensors

MAX_SHARD_SIZE = "5GB"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_BESIDE = re.compile(r"\.weights-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file to write: its name, and its tensors in their order there, under their first names."""

    name: str
    tensors: tuple[WantedTensor, ...]

    @property
    def header(self) -> bytes:
        """The beginning of the file."""
        return header_bytes([_form(each) for each in self.tensors])


def save_weights(
    model: nn.Module,
    absent: Mapping[str, nn.Parameter],
    path: str | Path,
    device: torch.device,
    *,
    most_bytes: float,
    in_stages: bool = False,
    others: Callable[[Path], object] = lambda _: None,
) -> None:
    """Write parameters and persistent buffers into the folder `path`; all ranks call it, rank 0 writes.

    most_bytes: of the tensors of a file; a larger tensor has one of its own. absent, in_stages: as of `whole_state`.
    others: writes further files of the folder, on rank 0. Raises ConfigurationError on every rank.
    """
    files = attempt_on_all(lambda: _with_headers(wanted_tensors(model, absent), most_bytes), "files of weights")
    beside = Path(from_first_rank(lambda: _folder_beside(Path(path), others), "the folder of weights"))
    writer = _Writer(beside)
    for file in files:
        if rank() == 0:
            writer.append(file.name, file.header)
        for whole in whole_tensors(file.tensors, absent, device, in_stages=in_stages):
            if rank() == 0:
                writer.append(file.name, bytes_of(whole))
    from_first_rank(lambda: _commit(writer, files, Path(path)), "the saved weights")


def _with_headers(wanted: Sequence[WantedTensor], most_bytes: float) -> list[WrittenFile]:
    """The files; each has at most `most_bytes`. Raises ConfigurationError for what they cannot hold."""
    shards: list[list[WantedTensor]] = [[]]
    size = 0
    for each in wanted:
        added = _form(each).size
        if shards[-1] and size + added > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(each)
        size += added
    files = []
    for number, shard in enumerate(shards, 1):
        name = ONE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        aligned = sorted(shard, key=lambda each: -each.tensor.dtype.itemsize)
        files.append(WrittenFile(name=name, tensors=tuple(aligned)))
        header_bytes([_form(each) for each in shard])
    return files


def _form(wanted: WantedTensor) -> TensorForm:
    return TensorForm(name=wanted.names[0], dtype=wanted.tensor.dtype, shape=tuple(wanted.tensor.shape))


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"cannot write weights to {path}: {error.strerror or error}") from error


def _folder_beside(path: Path, others: Callable[[Path], object]) -> str:
    """A new folder in `path` with the `others`. What saves that were killed left there is removed."""
    with _refusals(path):
        if path.exists() and not path.is_dir():
            raise ConfigurationError(f"cannot write weights to {path}: it is a file; name a folder")
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.iterdir():
            if _BESIDE.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        beside = path / f".weights-{secrets.token_hex(4)}"
        beside.mkdir()
        try:
            others(beside)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        return str(beside)


def bytes_of(tensor: torch.Tensor) -> bytes | memoryview:
    """The values of a tensor, row-major; a view where they lie so on the host."""
    flat: Any = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def open_to_append(path: Path) -> BinaryIO:
    """A file of tensors, at its end."""
    return path.open("ab")


class _Writer:
    """Appends to files of a folder. The first error is kept until `finish`: the ranks that take part in the gathers
    would wait for one that stops."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._error: OSError | None = None

    def append(self, name: str, chunk: bytes | memoryview) -> None:
        """Bytes to the end of a file."""
        if self._error is not None:
            return
        try:
            with open_to_append(self.folder / name) as file:
                file.write(chunk)
        except OSError as error:
            self._error = error

    def finish(self, names: Sequence[str]) -> None:
        """Flush the files to the disk. Raises OSError."""
        if self._error is not None:
            raise self._error
        for name in names:
            with (self.folder / name).open("rb+") as file:
                os.fsync(file.fileno())


def _commit(writer: _Writer, files: Sequence[WrittenFile], path: Path) -> bool:
    """Move what was written to its place, and remove the shards that it replaces."""
    names = [file.name for file in files]
    with _refusals(path):
        try:
            writer.finish(names)
            if len(files) > 1:
                (writer.folder / INDEX_FILE).write_bytes(_index(files))
                (path / INDEX_FILE).unlink(missing_ok=True)
            own = [entry.name for entry in writer.folder.iterdir() if entry.name not in (*names, INDEX_FILE)]
            for name in (*own, *names, *([INDEX_FILE] if len(files) > 1 else [])):
                os.replace(writer.folder / name, path / name)
            _remove_replaced(path, names)
            sync_folder(path)
        finally:
            shutil.rmtree(writer.folder, ignore_errors=True)
    return True


def _index(files: Sequence[WrittenFile]) -> bytes:
    weight_map = {each.names[0]: file.name for file in files for each in file.tensors}
    total = sum(_form(each).size for file in files for each in file.tensors)
    return json.dumps({"metadata": {"total_size": total}, WEIGHT_MAP: weight_map}, indent=2).encode() + b"\n"


def _remove_replaced(path: Path, names: Sequence[str]) -> None:
    """Of an earlier save: shards, the index of shards, or the one file, which readers would take first."""
    if ONE_FILE in names:
        (path / INDEX_FILE).unlink(missing_ok=True)
    for entry in path.iterdir():
        if entry.name not in names and (entry.name == ONE_FILE or _SHARD.fullmatch(entry.name)):
            entry.unlink()
