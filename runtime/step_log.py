"""A log of training steps beside their prediction: what `autopar calibrate` refits a cluster from.

    with StepLog("run.jsonl", module.plan) as log:
        for batch in data:
            with log.step():
                module(**batch).backward()
                optimizer.step()

One JSON line per step, written by rank 0: {"step": 0, "seconds": 0.41, "exposed_communication_seconds": 0.12,
"peak_bytes": 3100000000, "predicted": {"seconds": 0.38, "exposed_communication_seconds": 0.1, "peak_bytes": ...}}.
Exposed communication is the time in which this rank waited for collectives; on GPUs, whose waits only order streams, it
is null. Where rows of mixtures of experts travel to the rank of their expert, "expert_rows" says how many of this
rank's went to each expert, per module: {"layers.0.experts": [812, 90, 61, 61]}; `expert_load="run.jsonl"` plans for the
sums of a log. "dropped_rows" says alike how many of these an expert had no place for (`ep="capacity"`). Peak memory is
that of tensors on a GPU, and of the whole process on a CPU, Python and torch included; it is 0 on Windows. Trackers
(`autopar.integrations.tensorboard`, `.wandb`) get the same numbers, by name: seconds/measured, seconds/predicted and
so on.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

import torch

if sys.platform != "win32":
    import resource

from autopar.errors import ConfigurationError
from autopar.ops.capped_rows import counted_drops
from autopar.ops.dispatch import counted_rows
from autopar.plans.parallel_plan import Plan
from autopar.request.expert_load import EXPERT_ROWS
from autopar.runtime.collectives.communicator import waited_seconds
from autopar.runtime.process_groups import rank

DROPPED_ROWS = "dropped_rows"
"""Key of the lines that counts rows for which an expert had no place."""


class StepTracker(Protocol):
    """Who keeps the numbers of steps elsewhere. It opens its files when it gets the first ones, which only rank 0
    does."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers of a step, by name."""

    def close(self) -> None:
        """Write what is left; only after numbers came."""


class StepLog:
    """See the module docstring. Only rank 0 opens the file; the others run their steps unlogged."""

    def __init__(self, path: str | Path, plan: Plan, *, trackers: Sequence[StepTracker] = ()) -> None:
        """Begin a new log at `path`, of a module that runs under `plan`; trackers get its numbers, too. Raises
        ConfigurationError where it cannot be written there; what was there stays then."""
        self._trackers = tuple(trackers)
        self._file = _opened(Path(path)) if rank() == 0 else None
        self._steps = 0
        self._predicted = {
            "seconds": plan.predicted.step_seconds,
            "exposed_communication_seconds": plan.predicted.exposed_communication_seconds,
            "peak_bytes": plan.predicted.peak_bytes,
        }

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            for tracker in self._trackers if self._steps else ():
                tracker.close()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step: everything inside of the block. A step that raises is not logged."""
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin, waited = time.perf_counter(), waited_seconds()
        with counted_rows() as counted, counted_drops() as capped:
            yield
        if cuda:
            torch.cuda.synchronize()
        self._write(
            {
                "step": self._steps,
                "seconds": time.perf_counter() - begin,
                "exposed_communication_seconds": None if cuda else waited_seconds() - waited,
                "peak_bytes": torch.cuda.max_memory_allocated() if cuda else _process_peak_bytes(),
                "predicted": self._predicted,
                **_rows_of_experts(_sums(counted), capped),
            }
        )
        self._steps += 1

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            for tracker in self._trackers:
                tracker.log(line["step"], _numbers_of(line))


def _numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """{"seconds/measured": 0.41, "seconds/predicted": 0.38, ...}, without what was not measured."""
    return {
        f"{name}/{kind}": float(values[name])
        for name in line["predicted"]
        for kind, values in (("measured", line), ("predicted", line["predicted"]))
        if values[name] is not None
    }


def _sums(counted: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, list[int]]:
    """Module -> rows per expert of all its calls."""
    return {module: torch.stack(list(rows)).sum(0).tolist() for module, rows in counted.items()}


def _rows_of_experts(
    counted: Mapping[str, list[int]], capped: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, list[int]]]:
    """Rows of every expert, and those of them that were dropped, where there are such; capped: of `counted_drops`."""
    rows = {**counted, **{module: both[0].tolist() for module, both in capped.items()}}
    drops = {module: both[1].tolist() for module, both in capped.items()}
    return {key: found for key, found in ((EXPERT_ROWS, rows), (DROPPED_ROWS, drops)) if found}


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w")
    except OSError as error:
        raise ConfigurationError(f"cannot write the log of steps {path}: {error.strerror or error}") from error


def _process_peak_bytes() -> int:
    if sys.platform == "win32":
        return 0  # Windows keeps no such count for its processes to read
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
