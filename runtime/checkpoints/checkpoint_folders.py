"""Folders of checkpoints: which files stand where, and the one rename that makes a checkpoint.

    run/                           a series: `save("run", ..., keep_last=2)`
      latest.json                  its checkpoints, the last one being the latest
      step-00000100/               a checkpoint: what `save("run/step-00000100", ...)` writes
        manifest.json              names the folder beside it
        checkpoint-data-3f2a9c1b/  tensors

A save writes a new folder of tensors, then renames a manifest that names it over the old one, then removes what the
manifest does not name. Killed anywhere, it leaves the old checkpoint or the new one, and files that the next save
removes. All functions are for rank 0 and raise ConfigurationError for what the system refuses.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import ConfigurationError
from autopar.files import sync_folder, write_atomically
from autopar.runtime.checkpoints.manifest import MANIFEST, Manifest, sealed, unsealed
from autopar.runtime.checkpoints.tensor_files import INDEX

LATEST = "latest.json"
_DATA = re.compile(r"checkpoint-data-[0-9a-f]{8}")
_STEP = re.compile(r"step-\d{8,}")
_HALF_WRITTEN = re.compile(r"\.(manifest|latest)\.json\.[0-9a-f]{8}")
_OF_TORCH = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The checkpoints of a series by name, in the order of their saves."""

    checkpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint to read. data: where its tensors are; manifest: None where an autopar without manifests wrote it."""

    folder: Path
    data: Path
    manifest: Manifest | None


def find_checkpoint(path: Path) -> FoundCheckpoint:
    """The checkpoint in the folder `path`, or the latest of the series there. Raises ConfigurationError."""
    with _refusals(f"cannot read {path}"):
        folder = _in_series(path) if (path / LATEST).is_file() else path
        if (folder / MANIFEST).is_file():
            manifest = _manifest(folder)
            return FoundCheckpoint(folder=folder, data=folder / manifest.folder, manifest=manifest)
        if (folder / INDEX).is_file():
            return FoundCheckpoint(folder=folder, data=folder, manifest=None)
        raise ConfigurationError(f"no checkpoint at {path}: {_what_is_there(folder)}")


def _in_series(path: Path) -> Path:
    latest = _series(path)[-1]
    if not (path / latest / MANIFEST).is_file():
        there = _listed(_steps(path))
        raise ConfigurationError(f"{path / LATEST} names {latest}, which is not there; load one of {path}: {there}")
    return path / latest


def _series(root: Path) -> tuple[str, ...]:
    """The checkpoints of the series, as its last save wrote them; none where there is no series."""
    path = root / LATEST
    if not path.exists():
        return ()
    try:
        return unsealed(path.read_bytes(), Series, str(path)).checkpoints
    except ConfigurationError as error:
        mend = f"load a checkpoint by its name ({_listed(_steps(root))}); without {LATEST}, the next save lists them"
        raise ConfigurationError(f"{error}; {mend}") from error


def _what_is_there(folder: Path) -> str:
    if not folder.exists():
        near = _steps(folder.parent) if folder.parent.is_dir() else []
        return "there is nothing of that name" + (f"; beside it are {_listed(near)}" if near else "")
    if not folder.is_dir():
        return "it is a file, and a checkpoint is a folder"
    if steps := _steps(folder):
        return f"the folder has no {LATEST}; name one of {_listed(steps)}"
    if any(_DATA.fullmatch(entry.name) for entry in folder.iterdir()):
        return "its first save was cut off"
    return f"the folder has no {MANIFEST}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[-5:]) or "none"


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    return unsealed(path.read_bytes(), Manifest, str(path))


def beside(folder: Path) -> str:
    """What to load in place of a checkpoint that is damaged: others of its series."""
    others = [name for name in _steps(folder.parent) if name != folder.name]
    return f"load another one ({_listed(others)} in {folder.parent})" if others else "load another one"


def begin_save(path: Path, step: int | None) -> tuple[Path, Path]:
    """(checkpoint, data): the folder of the checkpoint and a new, empty one in it for the tensors.

    step: of a checkpoint in the series at `path`; None where `path` is the checkpoint. What saves that were killed
    left behind there is removed.
    """
    with _refusals(f"cannot save to {path}"):
        root = Path(os.path.realpath(path))
        if root.exists() and not root.is_dir():
            raise ConfigurationError(f"{path} is a file, and a checkpoint is a folder: name a new one")
        if step is None and (root / LATEST).exists():
            raise ConfigurationError(f"{path} holds a series of checkpoints: pass keep_last=, or name a folder in it")
        if step is not None and ((root / MANIFEST).exists() or (root / INDEX).exists()):
            raise ConfigurationError(f"{path} is a checkpoint and no series: name another folder with keep_last=")
        if step is not None:
            _series(root)
        folder = root if step is None else root / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        data = folder / f"checkpoint-data-{secrets.token_hex(4)}"
        data.mkdir()
        return folder, data


def _clear(folder: Path) -> None:
    """Remove what no manifest names; nothing where the manifest cannot be read, since that may be mended."""
    try:
        named = _manifest(folder).folder if (folder / MANIFEST).exists() else None
    except ConfigurationError:
        return
    _remove_data(folder, named)


def _remove_data(folder: Path, kept: str | None) -> None:
    for entry in folder.iterdir():
        if _HALF_WRITTEN.fullmatch(entry.name):
            entry.unlink(missing_ok=True)
        elif _DATA.fullmatch(entry.name) and entry.name != kept:
            shutil.rmtree(entry, ignore_errors=True)


def abandon(folder: Path) -> None:
    """Remove what a save that failed has written, and the folder where it held nothing else."""
    with suppress(OSError):
        _clear(folder)
        folder.rmdir()


def commit(folder: Path, manifest: Manifest) -> None:
    """Make the tensors that the manifest names the checkpoint in `folder`, in place of any before it."""
    with _refusals(f"cannot save to {folder}"):
        sync_folder(folder / manifest.folder)
        write_atomically(folder / MANIFEST, sealed(manifest))
        sync_folder(folder)
    with suppress(OSError):  # the checkpoint is there; the next save tries again
        _remove_data(folder, manifest.folder)
        _remove_unlisted_tensors(folder)


def _remove_unlisted_tensors(folder: Path) -> None:
    """The files of a checkpoint without manifest that was here, its index first."""
    (folder / INDEX).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if _OF_TORCH.fullmatch(entry.name):
            entry.unlink()


def commit_to_series(folder: Path, keep_last: int) -> list[str]:
    """Make the checkpoint the latest of the series around it, and remove all but the last `keep_last`, which it names.

    In the order of their saves, so that a run which went back to an earlier step keeps what it wrote since.
    """
    root = folder.parent
    with _refusals(f"cannot save to {root}"):
        listed = [name for name in _series(root) if name != folder.name]
        others = [name for name in _steps(root) if name not in listed and name != folder.name]
        series = [*others, *listed, folder.name]
        write_atomically(root / LATEST, sealed(Series(checkpoints=tuple(series[-keep_last:]))))
        sync_folder(root)
    with suppress(OSError):
        _remove_data(root, None)
    for name in (*series[:-keep_last], *_parts(root)):
        with suppress(OSError):
            _remove_checkpoint(root / name)
    return series[-keep_last:]


def _steps(root: Path) -> list[str]:
    """Names of the checkpoints in a series, by step."""
    named = [entry for entry in root.iterdir() if _STEP.fullmatch(entry.name)]
    return sorted(entry.name for entry in named if (entry / MANIFEST).is_file())


def _parts(root: Path) -> list[str]:
    """Names of what killed saves and removals left of checkpoints, and nobody else put anything into."""
    named = [entry for entry in root.iterdir() if _STEP.fullmatch(entry.name) and entry.is_dir()]
    return [entry.name for entry in named if all(_is_part(inside.name) for inside in entry.iterdir())]


def _is_part(name: str) -> bool:
    return bool(_DATA.fullmatch(name) or _HALF_WRITTEN.fullmatch(name))


def _remove_checkpoint(folder: Path) -> None:
    """The manifest goes first: a part of a checkpoint is none. What a user put beside it stays."""
    (folder / MANIFEST).unlink(missing_ok=True)
    _remove_data(folder, None)
    folder.rmdir()


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise ConfigurationError(f"{what}: {error.strerror or error}{place}") from error
