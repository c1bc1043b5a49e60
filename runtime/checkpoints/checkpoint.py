"""Checkpoint: save under one plan and number of processes, go on under another.

    autopar.save("run", module, optimizer, keep_last=3, extra={"scheduler": scheduler, "position": 512})
    loaded = autopar.load("run", module, optimizer, extra={"scheduler": scheduler})       # the latest of the series
    loaded.step, loaded.extra["position"]

A save is there as a whole or not at all, and a load takes a whole checkpoint or changes nothing: files are checked,
names, shapes and dtypes compared, and values read to the host before the first one is taken.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from autopar.errors import ConfigurationError
from autopar.runtime.checkpoints import identities
from autopar.runtime.checkpoints.checkpoint_folders import (
    FoundCheckpoint,
    abandon,
    begin_save,
    beside,
    commit,
    commit_to_series,
    find_checkpoint,
)
from autopar.runtime.checkpoints.extra_state import (
    agree_on_extra,
    check_takers,
    extra_state,
    states_to_take,
    take_states,
    with_all_data_ranks,
)
from autopar.runtime.checkpoints.loaded_state import check_ties, empty_slots, take
from autopar.runtime.checkpoints.manifest import FORMAT, Manifest, SavedFile, saved_file
from autopar.runtime.checkpoints.tensor_files import INDEX, State, read_metadata, read_tensors, write_tensors
from autopar.runtime.checkpoints.training_state import EXTRA, OPTIMIZER, flat_state, group_names
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.consensus import agree_on_path, attempt_on_all, from_first_rank, gather_from_all
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.process_groups import rank, world_size

log = logging.getLogger(__name__)
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What a load found. extra: values by name, as data; left_out (`strict=False`): name -> how checkpoint and run
    differ there."""

    folder: Path
    step: int
    extra: Mapping[str, Any]
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a checkpoint will hold, of this rank: tensors are shared with the run. groups: the parameters of each group
    of the optimizer, of all ranks."""

    state: State
    step: int
    plan: str
    optimizer: str
    groups: tuple[tuple[str, ...], ...]


def save(
    path: str | Path,
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] = _NOTHING,
    step: int | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write a checkpoint to the folder `path`, in place of one that is there, and return its folder.

    It holds parameters, buffers, optimizer state, the state of the random draws, and `extra`: name -> plain data, or
    what has `state_dict` and `load_state_dict`, such as a scheduler; in a `PerDataRank` where it differs by rank.
    step: of the run (default: the module's calls). keep_last: `path` is a series; write `path/step-00000100` and keep
    the last so many. Every rank calls it.

    Raises ConfigurationError for what cannot be saved, and for what the system refuses (a full disk, a closed
    folder); what was there before is whole then.
    """
    with HERE.inside("save"):
        attempt_on_all(lambda: _check_numbers(step, keep_last))
        return write_snapshot(path, take_snapshot(module, optimizer, extra=extra, step=step), keep_last=keep_last)


def _check_numbers(step: int | None, keep_last: int | None) -> None:
    for name, number, least in (("step", step, 0), ("keep_last", keep_last, 1)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
            raise ConfigurationError(f"{name}={number!r} is no whole number from {least} on")


def take_snapshot(
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None,
    *,
    extra: Mapping[str, Any] = _NOTHING,
    step: int | None = None,
) -> Snapshot:
    """What `save` writes, without writing it; every rank calls it. Raises as `save`."""
    state = attempt_on_all(lambda: flat_state(module, optimizer))
    beside_it = attempt_on_all(lambda: extra_state(extra))
    beside_it = with_all_data_ranks(beside_it, extra, module)
    agree_on_extra(beside_it)
    return Snapshot(
        state=state | (beside_it if rank() == 0 else {}),
        step=module.calls if step is None else step,
        plan=hashlib.sha256(module.plan.to_json()).hexdigest(),
        optimizer="" if optimizer is None else type(optimizer).__name__,
        groups=() if optimizer is None else _groups_of_all(group_names(module, optimizer)),
    )


def _groups_of_all(mine: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    ranks = gather_from_all(mine)
    return tuple(tuple(sorted({name for names in group for name in names})) for group in zip(*ranks, strict=True))


def write_snapshot(path: str | Path, snapshot: Snapshot, *, keep_last: int | None = None) -> Path:
    """Write what was taken, as `save` does; every rank calls it."""
    agree_on_path(path)
    folder, data = from_first_rank(lambda: begin_save(Path(path), None if keep_last is None else snapshot.step))
    try:
        write_tensors(snapshot.state, data)
        files = gather_from_all(attempt_on_all(lambda: _written_by_this_rank(data)))
        from_first_rank(lambda: _commit(folder, data, snapshot, {n: f for found in files for n, f in found.items()}))
    except BaseException:
        if rank() == 0:
            abandon(folder)
        raise
    if keep_last is not None:
        from_first_rank(lambda: commit_to_series(folder, keep_last))
    return folder


def _written_by_this_rank(data: Path) -> dict[str, SavedFile]:
    names = [path.name for path in data.glob(f"__{rank()}_*")] + ([INDEX] if rank() == 0 else [])
    try:
        return {name: saved_file(data / name) for name in sorted(names)}
    except OSError as error:
        raise ConfigurationError(f"cannot read what was written to {data}: {error.strerror or error}") from error


def _commit(folder: Path, data: Path, snapshot: Snapshot, files: Mapping[str, SavedFile]) -> bool:
    commit(folder, manifest_of(snapshot, data.name, identities.saved_forms(read_metadata(data)), files))
    return True


def manifest_of(
    snapshot: Snapshot, folder: str, forms: identities.Forms, files: Mapping[str, SavedFile]
) -> Manifest:
    """What says that a snapshot is a checkpoint. folder: of its tensors; forms: what the index says that they hold."""
    return Manifest(
        format=FORMAT,
        autopar=_version(),
        torch=str(torch.__version__),
        plan=snapshot.plan,
        processes=world_size(),
        step=snapshot.step,
        folder=folder,
        optimizer=snapshot.optimizer,
        groups=snapshot.groups,
        tensors={name: form for name, form in forms.items() if form is not None},
        objects=tuple(name for name, form in forms.items() if form is None),
        files=files,
    )


def _version() -> str:
    try:
        return metadata.version("autopar")
    except metadata.PackageNotFoundError:  # run from its source
        return ""


def load(
    path: str | Path,
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] = _NOTHING,
    strict: bool = True,
) -> LoadedCheckpoint:
    """Read what `save` wrote, or the latest of a series, each tensor into the layout that it has here.

    extra: name -> what takes its state back (`load_state_dict`). strict=False: take what agrees in name, shape and
    dtype, and say what does not (`left_out`). Every rank calls it; module, optimizer and extra may be of another plan
    and number of processes than those that were saved.

    Raises ConfigurationError where there is no whole checkpoint, or one of another model; nothing is changed then.
    """
    with HERE.inside("load"):
        return _load(Path(path), module, optimizer, extra, strict)


def _load(
    path: Path,
    module: ParallelModule,
    optimizer: torch.optim.Optimizer | None,
    extra: Mapping[str, Any],
    strict: bool,
) -> LoadedCheckpoint:
    attempt_on_all(lambda: check_takers(extra))
    agree_on_path(path)
    found = from_first_rank(lambda: find_checkpoint(path))
    _check_files(found)
    index = attempt_on_all(lambda: read_metadata(found.data))
    saved = identities.saved_forms(index)
    state = attempt_on_all(lambda: flat_state(module, optimizer))
    differences = attempt_on_all(
        lambda: identities.differences(saved, found.manifest, state, module, optimizer, extra)
    )
    left_out = _compared(found, differences, strict)
    names = identities.agreeing(saved, state, module, optimizer is not None, left_out)
    values = attempt_on_all(lambda: empty_slots(names, state, module))
    read_tensors(values, found.data, index)
    attempt_on_all(lambda: check_ties(values, module))
    take_states(attempt_on_all(lambda: states_to_take(values, module, extra)))
    kept = identities.differing_parameters(module, left_out)
    take(values, state, module, None if OPTIMIZER in left_out else optimizer, kept)
    return LoadedCheckpoint(
        folder=found.folder,
        step=found.manifest.step if found.manifest else module.calls,
        extra={name.removeprefix(EXTRA): value[0] for name, value in values.items() if name.startswith(EXTRA)},
        left_out=left_out,
    )


def _compared(found: FoundCheckpoint, differences: Mapping[str, str], strict: bool) -> dict[str, str]:
    """What is left out on any rank. Raises ConfigurationError where that is an error."""
    merged = {name: difference for one in reversed(gather_from_all(differences)) for name, difference in one.items()}
    if strict:
        identities.refuse(found.folder, merged)
    return merged


def _check_files(found: FoundCheckpoint) -> None:
    """Raises ConfigurationError, on every rank, with the files that are not as written; each rank reads some."""
    if found.manifest is None:
        if rank() == 0:
            log.warning("the checkpoint %s has no checksums, an older autopar wrote it: read unchecked", found.folder)
        return
    files = sorted(found.manifest.files.items(), key=lambda item: item[1].bytes)
    damage = [_damage(found.data / name, file) for name, file in files[rank() :: world_size()]]
    if damaged := [text for texts in gather_from_all(damage) for text in texts if text]:
        what = "; ".join(damaged)
        raise ConfigurationError(
            f"the checkpoint {found.folder} is damaged, nothing was changed: {what}: {beside(found.folder)}"
        )


def _damage(path: Path, expected: SavedFile) -> str:
    """What is wrong with a file, "" where nothing is."""
    try:
        file = saved_file(path)
    except OSError as error:
        return f"{path.name} cannot be read by rank {rank()} ({error.strerror or error})"
    if file.bytes != expected.bytes:
        return f"{path.name} has {file.bytes:,} bytes, {expected.bytes:,} were written"
    return "" if file == expected else f"{path.name} is not what was written (its SHA-256 is another)"
