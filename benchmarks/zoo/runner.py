"""The runner: one row after the other, each on a few processes; nothing that a row does stops or touches the next one.

A row that is late is killed with its processes and says in which phase it was; a row that crashes a process or raises
where no error was expected says so. Every row gets new processes, forked in a moment from one that has imported all
there is to import: torch's DTensor caches meshes by value, so a second process group in one process meets old groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.workers import WORKERS, Pool, WorkerError
from benchmarks.zoo.registry import ZooEntry
from benchmarks.zoo.row import Row

SECONDS_A_ROW = 25.0
SECONDS_TO_START = 300.0
JOB = "benchmarks.zoo.row_job"


@dataclass(slots=True)
class Reports:
    """The last row and the last error that the processes of one row reported."""

    row: Row
    error: str = ""
    started: float = field(default_factory=time.perf_counter)

    def take(self, content: Row | str) -> None:
        """One report: rank 0's row, or the error of any rank."""
        if isinstance(content, str):
            self.error = content
        else:
            self.row = content

    def finished(self, row: Row) -> Row:
        """The row with its whole time."""
        return replace(row, seconds={**row.seconds, "row": round(time.perf_counter() - self.started, 3)})


def run_row(
    pool: Pool, entry: ZooEntry, modules: Sequence[str], *, seconds: float = SECONDS_A_ROW, processes: int = WORKERS
) -> Row:
    """The row of one entry, whatever happens to it."""
    pool.run(f"{JOB}:ready", world_size=processes, timeout=SECONDS_TO_START)
    reports = Reports(Row(name=entry.name, family=entry.family))
    try:
        rows = pool.run(
            f"{JOB}:check",
            world_size=processes,
            timeout=seconds,
            on_report=reports.take,
            name=entry.name,
            modules=tuple(modules),
        )
    except WorkerError as error:
        late = f"timed out: {seconds:g} s were over in phase {reports.row.phase!r}"
        crashed = f"crashed: in phase {reports.row.phase!r}: {str(error).strip().splitlines()[-1]}"
        reason = late if error.late else crashed
        return reports.finished(replace(reports.row, stopped=f"{reason}; {reports.error}" if reports.error else reason))
    return reports.finished(replace(rows[0], phase="done"))


def run_rows(
    entries: Sequence[ZooEntry],
    modules: Sequence[str],
    *,
    seconds: float = SECONDS_A_ROW,
    processes: int = WORKERS,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """All rows, each handed to `on_row` when it is complete."""
    pool = Pool(processes, preload=(JOB, *modules))
    rows = []
    try:
        for entry in entries:
            rows.append(run_row(pool, entry, modules, seconds=seconds, processes=processes))
            on_row(rows[-1])
            pool.close()
    finally:
        pool.close()
    return rows


def append_row(path: Path, row: Row) -> None:
    """Add one line to the file of rows."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def read_rows(path: Path) -> Iterator[Row]:
    """The complete lines of a file of rows; a last line that was cut off is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield msgspec.json.decode(line, type=Row)
