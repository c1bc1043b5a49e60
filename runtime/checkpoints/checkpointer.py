"""Checkpointer: checkpoints that are written beside the training, at an interval, and from which a run goes on.

    with autopar.Checkpointer("run", module, optimizer, every="10min", keep=3, extra={"scheduler": scheduler}) as saver:
        saver.resume()                   # the latest, where there is one
        for batch in loader:
            module(**batch).backward()
            optimizer.step()
            saver.step()                 # copies what is due to the host; a process beside this one writes it

Training waits for the copy, not for the disk. What is written is a series of `autopar.save`, loaded by `autopar.load`,
too; it is there as a whole or not at all.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from autopar.errors import ConfigurationError
from autopar.files import file_content
from autopar.plans.parallel_plan import Plan
from autopar.runtime.checkpoints.background_writer import PLAN, Commit, WriteRequest, WriterProcess
from autopar.runtime.checkpoints.checkpoint import LoadedCheckpoint, Snapshot, load, manifest_of, take_snapshot
from autopar.runtime.checkpoints.checkpoint_folders import LATEST, begin_save, find_checkpoint
from autopar.runtime.checkpoints.extra_state import Stateful
from autopar.runtime.checkpoints.identities import saved_forms
from autopar.runtime.checkpoints.staged_copy import Arena, PlannedSave, planned_save, staged_bytes
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.consensus import agree_on_path, attempt_on_all, from_first_rank, gather_from_all
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.process_groups import rank, world_size

log = logging.getLogger(__name__)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_INTERVAL = re.compile(r"(\d+(?:\.\d+)?) *(s|min|h)")
DRAWS = "autopar.draws"
"""Name in `extra` of the states of random generators, a list by rank."""
_LOOKS_EVERY = 0.02
"""Seconds between two looks whether everything is written."""
LOOK_AHEAD = 0.5
"""Part of the time left after which ranks look again whether a checkpoint is due: a look is an exchange. By the mean
of the steps so far, and never further ahead than so many: the first ones may be queued on a device, and seem short."""


class Checkpointer:
    """See the module docstring. All ranks make one, and call its methods alike.

    stalls: seconds for which training stood still, of every checkpoint so far."""

    def __init__(
        self,
        folder: str | Path,
        module: ParallelModule,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int | str,
        keep: int = 3,
        extra: Mapping[str, Any] = _NOTHING,
    ) -> None:
        """folder: of the series, which all ranks reach. every: steps between checkpoints, or time ("10min", "90s",
        "2h"). keep: the last so many stay. extra: as of `autopar.save`: schedulers, scalers, data loaders in a
        `PerDataRank`, plain data. Saved beside them: the random generators of every rank, and the plan.

        Raises ConfigurationError for an interval or a number that is none."""
        self._folder, self._module, self._optimizer, self._extra = Path(folder), module, optimizer, dict(extra)
        self._steps, self._seconds = _interval(every)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigurationError(f"keep={keep!r} is no whole number from 1 on")
        self._keep = keep
        self._writer: WriterProcess | None = None
        self._arena: Arena | None = None
        self._first, self._step, self._look_at, self._pending = 0, 0, 1, 0
        self._saved_at = self._began = time.monotonic()
        self.stalls: list[float] = []

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    # going on

    def resume(self) -> LoadedCheckpoint | None:
        """Load the latest checkpoint of the series into module, optimizer and `extra`, as `autopar.load`, and go on
        counting behind its step; None where there is none yet. Random generators are set where as many ranks run."""
        agree_on_path(self._folder)
        if not from_first_rank(lambda: [(self._folder / LATEST).is_file()])[0]:
            return None
        takers = {name: value for name, value in self._extra.items() if isinstance(value, Stateful)}
        loaded = load(self._folder, self._module, self._optimizer, extra=takers)
        draws = loaded.extra.get(DRAWS)
        if isinstance(draws, list) and len(draws) == world_size():
            _set_draws(draws[rank()])
        elif draws:
            log.info("random generators stay as they are: %d ranks saved theirs, %d run", len(draws), world_size())
        self._first = self._step = self._pending = loaded.step
        self._look_at = loaded.step + 1
        self._saved_at = self._began = time.monotonic()
        return loaded

    @staticmethod
    def latest_plan(folder: str | Path) -> Plan | None:
        """The plan under which the latest checkpoint of a series was saved; None where there is none yet. Any process
        may ask, also before `autopar.compile`."""
        if not (Path(folder) / LATEST).is_file():
            return None
        path = find_checkpoint(Path(folder)).data / PLAN
        return Plan.from_json(file_content(path, f"the plan {path}"), str(path)) if path.exists() else None

    # saving

    @property
    def steps(self) -> int:
        """How often `step` was called, behind what was resumed."""
        return self._step

    def step(self) -> bool:
        """Count a step, and save where it is time to; whether a save began. Where the one before is still being
        written, this one waits for the next step that finds it done.

        Raises ConfigurationError, on every rank, in a step that is due, where the checkpoint before could not be
        written; those before it are whole."""
        self._step += 1
        self._started()
        if self._steps is not None:
            is_due = self._look_at <= self._step and self._step >= self._pending + self._steps
        else:
            is_due = self._look_at <= self._step and self._time_has_come()
        if not is_due:
            return False
        with HERE.inside("save"):
            if self._is_busy():
                self._look_at = self._step + 1
                return False
            self._save()
        return True

    def save(self) -> None:
        """Save now, behind what is still being written. Raises as `step`."""
        with HERE.inside("save"):
            self._wait()
            self._save()

    def wait(self) -> None:
        """Until all that was saved is on the disk. Raises as `step`."""
        if self._writer is not None:
            with HERE.inside("save"):
                self._wait()

    def _wait(self) -> None:
        while self._is_busy():
            time.sleep(_LOOKS_EVERY)

    def close(self) -> None:
        """As `wait`; the process that writes has ended then."""
        try:
            self.wait()
        finally:
            self._end()

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.end()
        self._writer = self._arena = None

    def _is_busy(self) -> bool:
        """Whether any rank still writes. Raises ConfigurationError, on every rank, where one failed to."""
        writer = self._started()
        busy, failures = zip(*gather_from_all((writer.is_busy, writer.failure())), strict=True)
        failed = [f"rank {at}: {why}" for at, why in enumerate(failures) if why]
        if failed:
            self._end()  # it may wait for one that failed, or be gone itself; the next save has another one
            raise ConfigurationError(
                f"the checkpoint of step {self._pending} was not written to {self._folder} ({'; '.join(failed)}): "
                "those before it are whole; make room there and go on, or name another folder"
            )
        return any(busy)

    def _started(self) -> WriterProcess:
        """The process that writes, from the first step on: it takes seconds to start. Raises ConfigurationError, on
        every rank, where one cannot start it."""
        if self._writer is None:
            self._writer = attempt_on_all(WriterProcess, "the process that writes")
        return self._writer

    def _time_has_come(self) -> bool:
        """By the clock of rank 0, which also says at which step to look again."""
        is_due, self._look_at = from_first_rank(self._looked, "whether a checkpoint is due")
        return is_due

    def _looked(self) -> tuple[bool, int]:
        assert self._seconds is not None
        now = time.monotonic()
        left = self._seconds - (now - self._saved_at)
        counted = max(self._step - self._first, 1)
        per_step = max((now - self._began) / counted, 1e-6)
        return left <= 0.0, self._step + max(1, min(counted, int(LOOK_AHEAD * left / per_step)))

    def _save(self) -> None:
        began = time.perf_counter()
        extra = {**self._extra, DRAWS: gather_from_all(_draws(), "random generators")}
        snapshot = take_snapshot(self._module, self._optimizer, extra=extra, step=self._step)
        agree_on_path(self._folder)
        planned = planned_save(snapshot.state)
        items = planned.mine.items
        arena = attempt_on_all(lambda: self._arena_of(staged_bytes(items)), "memory for the copy")
        places = attempt_on_all(lambda: arena.fill(items, planned.planner), "the copy to the host")
        folder, data = from_first_rank(lambda: begin_save(self._folder, self._step))
        commit = attempt_on_all(lambda: self._commit(snapshot, planned, data) if rank() == 0 else None, "the manifest")
        self._started().write(
            WriteRequest(
                arena=arena.path,
                arena_bytes=arena.nbytes,
                folder=folder,
                data=data,
                rank=rank(),
                plan=planned.mine,
                places=places,
                commit=commit,
            )
        )
        self._pending, self._saved_at = self._step, time.monotonic()
        self.stalls.append(time.perf_counter() - began)

    def _arena_of(self, nbytes: int) -> Arena:
        if self._arena is None or self._arena.nbytes < nbytes:
            self._arena = Arena(nbytes)
        return self._arena

    def _commit(self, snapshot: Snapshot, planned: PlannedSave, data: Path) -> Commit:
        return Commit(
            items=tuple(tuple(plan.items) for plan in planned.plans),
            metadata=planned.metadata,
            manifest=manifest_of(snapshot, data.name, saved_forms(planned.metadata), {}),
            plan=self._module.plan.to_json(),
            keep=self._keep,
        )


def _interval(every: int | str) -> tuple[int | None, float | None]:
    """(steps, seconds), of which one is None."""
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every, None
    match = _INTERVAL.fullmatch(every.strip()) if isinstance(every, str) else None
    if match is None or float(match[1]) == 0.0:
        raise ConfigurationError(
            f'every={every!r} is no interval: write a number of steps, or a time ("10min", "90s", "2h")'
        )
    return None, float(match[1]) * _SECONDS[match[2]]


def _draws() -> dict[str, Any]:
    """The states of the random generators of this process, as data."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = [name, keys.tolist(), *rest]
    return found


def _set_draws(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(states["numpy"]))
