"""Background writer: a process beside every rank that writes what the rank has staged, while the rank trains on.

    writer = WriterProcess()
    writer.write(request)          # returns at once
    writer.is_busy, writer.failure()

Each writes its own file of torch.distributed.checkpoint, and beside it `written-3.json`: what lies where, and
checksums. The writer of rank 0 waits for all of these, writes the index, and commits the checkpoint with one rename
(`checkpoint_folders.py`). A writer ends with its rank, at once, so that no two jobs write to one folder; what is half
written then no manifest names.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from autopar._compat import storage_info
from autopar.errors import ConfigurationError
from autopar.files import as_record, file_content, write_atomically
from autopar.runtime.checkpoints.checkpoint_folders import abandon, commit, commit_to_series
from autopar.runtime.checkpoints.manifest import Manifest, SavedFile, saved_file
from autopar.runtime.checkpoints.staged_copy import Place, tensor_at
from autopar.runtime.checkpoints.tensor_files import INDEX

PLAN = "plan.json"
"""The plan of the run, beside its tensors."""
_LOOKS_EVERY = 0.05
"""Seconds between two looks for what other writers have written."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What makes a checkpoint of all that was written; for the writer of rank 0. items: of every rank's plan; manifest:
    without files; plan: the file of the run's plan."""

    items: tuple[tuple[WriteItem, ...], ...]
    metadata: Metadata
    manifest: Manifest
    plan: bytes
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """What one rank has staged. arena: the file of the memory, which has arena_bytes; folder, data: of the checkpoint
    and of its tensors; places: of the values of the plan's items."""

    arena: str
    arena_bytes: int
    folder: Path
    data: Path
    rank: int
    plan: SavePlan
    places: tuple[Place | bytes, ...]
    commit: Commit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """Where an item of a rank's plan lies."""

    item: int
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What a writer has written; error: why it has not."""

    files: Mapping[str, SavedFile]
    writes: tuple[_Write, ...]
    error: str = ""


# on the side of the rank


class WriterProcess:
    """See the module docstring. It starts at once, and is ready when torch is loaded there. Raises ConfigurationError
    where the system starts none."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **alone},
                start_new_session=True,  # Ctrl-C is for the rank, also before this process ignores it
            )
        except OSError as error:
            raise ConfigurationError(
                f"no process can be started that writes checkpoints in the background ({error.strerror or error}): "
                "raise the limits on processes and memory, or use autopar.save"
            ) from error
        self._pending: Future[str] | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        """Whether something is still being written."""
        return self._pending is not None and not self._pending.done()

    def write(self, request: WriteRequest) -> None:
        """Begin to write; nothing else may be pending."""
        assert not self.is_busy
        self._pending = Future()
        # a daemon: a rank that ends does not wait for what another one never writes
        threading.Thread(target=self._ask, args=(request, self._pending), daemon=True).start()

    def failure(self) -> str:
        """Why the last request was not done, "" where it was; asked once."""
        if self._pending is None or self.is_busy:
            return ""
        done, self._pending = self._pending, None
        error = done.exception()
        return done.result() if error is None else f"the process that writes has ended ({error})"

    def _ask(self, request: WriteRequest, answer: Future[str]) -> None:
        try:
            _put(self._process.stdin, request)
            answer.set_result(_got(self._process.stdout))
        except Exception as error:  # the process has ended, or `end` closed its pipes
            answer.set_exception(error)

    def end(self) -> None:
        """End the process; what is half written stays half written."""
        self._process.kill()
        self._process.wait()
        if self._pending is not None:
            self._pending.exception()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def _put(stream: BinaryIO | Any, value: Any) -> None:
    content = pickle.dumps(value)
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def _got(stream: BinaryIO | Any) -> Any:
    """Raises EOFError where the other side has ended."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("its pipe is closed")
    (length,) = _LENGTH.unpack(head)
    return pickle.loads(stream.read(length))  # between a process and its child


# on the side of the writer


def serve() -> None:
    """Do what comes on the standard input, and end with it. A signal that asks all processes of a job to end leaves
    that to the rank, which may save before it does."""
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    os.nice(5)
    requests: queue.Queue[WriteRequest] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    threading.Thread(target=_end_behind, args=(os.getppid(),), daemon=True).start()
    memory: dict[str, torch.Tensor] = {}
    while True:
        request = requests.get()
        _put(answers, _done(request, memory))


def _listen(requests: queue.Queue[WriteRequest]) -> None:
    while True:
        try:
            requests.put(_got(sys.stdin.buffer))
        except EOFError:
            os._exit(0)


def _end_behind(parent: int) -> None:
    """End where the rank has ended, though processes that it forked may still hold its end of the pipe."""
    while os.getppid() == parent:
        time.sleep(_LOOKS_EVERY)
    os._exit(0)


def _done(request: WriteRequest, memory: dict[str, torch.Tensor]) -> str:
    try:
        _write(request, memory)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        try:
            _tell(request, _Written(files={}, writes=(), error=why))
            if request.commit is not None:
                abandon(request.folder)
        except ConfigurationError:  # the folder is gone: rank 0 hears of it from its own writer
            return why
        return why
    return ""


def _write(request: WriteRequest, memory: dict[str, torch.Tensor]) -> None:
    if request.arena not in memory:
        memory.clear()
        memory[request.arena] = torch.from_file(
            request.arena, shared=True, size=request.arena_bytes, dtype=torch.uint8
        )
    staged = _Staged(request, memory[request.arena])
    results = FileSystemWriter(request.data).write_data(request.plan, staged).value()  # type: ignore[arg-type]
    numbers = {item.index: number for number, item in enumerate(request.plan.items)}
    writes = tuple(
        _Write(
            item=numbers[each.index],
            file=each.storage_data.relative_path,
            offset=each.storage_data.offset,
            length=each.storage_data.length,
        )
        for each in results
    )
    files = {name: saved_file(request.data / name) for name in sorted({each.file for each in writes})}
    _tell(request, _Written(files=files, writes=writes))
    if request.commit is not None:
        _commit(request, request.commit)


class _Staged:
    """What torch asks for the values of a plan's items."""

    def __init__(self, request: WriteRequest, memory: torch.Tensor) -> None:
        self._memory = memory
        self._places = {item.index: place for item, place in zip(request.plan.items, request.places, strict=True)}

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The value."""
        place = self._places[item.index]
        return io.BytesIO(place) if isinstance(place, bytes) else tensor_at(self._memory, place)


def _told(data: Path, rank: int) -> Path:
    return data / f"written-{rank}.json"


def _tell(request: WriteRequest, written: _Written) -> None:
    write_atomically(_told(request.data, request.rank), msgspec.json.encode(written))


def _commit(request: WriteRequest, wanted: Commit) -> None:
    """Wait for all ranks, and make a checkpoint of what they wrote. Raises ConfigurationError where one could not."""
    found = [_heard(request.data, rank) for rank in range(len(wanted.items))]
    for rank, written in enumerate(found):
        if written.error:
            raise ConfigurationError(f"rank {rank}: {written.error}")
    results = [_results(written, items) for written, items in zip(found, wanted.items, strict=True)]
    FileSystemWriter(request.data).finish(wanted.metadata, results)
    write_atomically(request.data / PLAN, wanted.plan)
    for rank in range(len(found)):
        _told(request.data, rank).unlink()
    files = {name: file for written in found for name, file in written.files.items()}
    files |= {name: saved_file(request.data / name) for name in (INDEX, PLAN)}
    commit(request.folder, replace(wanted.manifest, files=files))
    commit_to_series(request.folder, wanted.keep)


def _heard(data: Path, rank: int) -> _Written:
    path = _told(data, rank)
    while not path.exists():  # a rank that has ended ends the job, and this process with its rank
        time.sleep(_LOOKS_EVERY)
    return as_record(file_content(path, str(path)), _Written, str(path))


def _results(written: _Written, items: Sequence[WriteItem]) -> list[WriteResult]:
    return [_result(each, items[each.item].index) for each in written.writes]


def _result(write: _Write, index: MetadataIndex) -> WriteResult:
    place = storage_info(write.file, write.offset, write.length)
    return WriteResult(index=index, size_in_bytes=write.length, storage_data=place)


if __name__ == "__main__":
    serve()
