"""The runner: one fault after the other, each on new processes; what a fault does touches no other one.

Every process is forked from a template that has imported and warmed what is needed, so a row costs a fork per process.
A row ends when all processes but the culprits have ended, or when its time is over: then what is left is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.faults.acting import Part, act
from benchmarks.faults.fault import POINTS, Fault, digest_of, protected_paths
from benchmarks.faults.verdicts import RankEnd, Verdict, judge, worse
from benchmarks.faults.victims import warmed
from benchmarks.templates import ForkedWorker, Templates, templates_with

PRELOAD = (
    "autopar.api",
    "autopar.cli.plan_command",
    "autopar.cli.question_commands",
    "autopar.explain.what_if",
    "benchmarks.faults.acting",
    "benchmarks.faults.victims",
    "transformers",
)
ROOT = Path(__file__).resolve().parents[2]
PART_OF_A_LOG = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """One row: the fault and its verdict. lost: protected paths that are gone or changed; seconds: until the last
    process ended."""

    name: str
    point: int
    processes: int
    does: str
    expected: str
    verdict: str
    happened: str
    seconds: float
    named: bool | None
    lost: tuple[str, ...]
    good: bool

    def as_json(self) -> dict[str, Any]:
        """For the results."""
        return {**asdict(self), "class": POINTS[self.point]}


def warm_templates(modules: Sequence[str]) -> Templates:
    """Templates that have imported these modules of faults, and compiled and planned once."""
    templates = templates_with((*PRELOAD, *modules))
    templates.prepare(f"{__name__}:warm", {})
    return templates


def run_faults(
    faults: Sequence[Fault],
    modules: Sequence[str],
    templates: Templates,
    on_row: Callable[[FaultRow], object] = lambda row: None,
) -> list[FaultRow]:
    """The rows of these faults of `modules`; `on_row` gets each when it has ended."""
    rows = []
    for each in faults:
        rows.append(run_fault(each, modules, templates))
        on_row(rows[-1])
    return rows


def warm() -> None:
    """What templates do first: see `prepare`."""


warm.prepare = warmed  # type: ignore[attr-defined]


def run_fault(fault: Fault, modules: Sequence[str], templates: Templates) -> FaultRow:
    """The row of one fault, whatever happens to its processes."""
    with tempfile.TemporaryDirectory(prefix="autopar-fault-") as name:
        folder, begin = Path(name), time.monotonic()
        ends = _ends(fault, tuple(modules), templates, folder, afterwards=False)
        lost = _lost(folder)
        verdict = judge(fault, ends, lost)
        if fault.then is not None and verdict.good:
            verdict = worse(verdict, _afterwards(fault, tuple(modules), templates, folder))
        seconds = time.monotonic() - begin
    return FaultRow(
        name=fault.name, point=fault.point, processes=fault.processes, does=fault.does,
        expected=fault.expected, verdict=verdict.word,
        happened=verdict.happened.replace(name, "").replace(f"{ROOT}/", ""), seconds=round(seconds, 2),
        named=verdict.named, lost=lost, good=verdict.good,
    )  # fmt: skip


def _afterwards(fault: Fault, modules: tuple[str, ...], templates: Templates, folder: Path) -> Verdict:
    """Of what new processes do; they must be right, all of them."""
    sound = replace(fault, right=True, words=(), culprits=frozenset())
    return judge(sound, _ends(fault, modules, templates, folder, afterwards=True), _lost(folder))


def _lost(folder: Path) -> tuple[str, ...]:
    return tuple(path.name for path, digest in protected_paths(folder).items() if digest_of(path) != digest)


def _ends(
    fault: Fault, modules: tuple[str, ...], templates: Templates, folder: Path, *, afterwards: bool
) -> list[RankEnd]:
    """What became of every process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    workers: list[tuple[ForkedWorker, Connection]] = []
    for rank in range(fault.processes):
        mine, theirs = multiprocessing.Pipe()
        with contextlib.closing(theirs):
            workers.append((templates.fork(act, rank, theirs), mine))
        mine.send(
            Part(name=fault.name, modules=modules, rank=rank, port=store.port, folder=folder, afterwards=afterwards)
        )
    everyone = set(range(fault.processes))
    awaited = everyone if afterwards else everyone - fault.culprits or everyone
    told = _told({rank: connection for rank, (_, connection) in enumerate(workers)}, awaited, fault.seconds)
    for worker, connection in workers:
        worker.kill()
        worker.join()
        connection.close()
    return [_with_log(told[rank], folder, fault.warning) for rank in range(fault.processes)]


def _told(connections: dict[int, Connection], awaited: set[int], seconds: float) -> dict[int, RankEnd]:
    """By rank what its process told, until all `awaited` have ended, or `seconds` are over."""
    begin, running = time.monotonic(), dict(connections)
    told: dict[int, RankEnd] = {}
    while awaited & running.keys() and (left := begin + seconds - time.monotonic()) > 0:
        for ready in wait(list(running.values()), left):
            assert isinstance(ready, Connection)
            rank = next(each for each, connection in running.items() if connection is ready)
            try:
                told[rank] = ready.recv()
            except (EOFError, ConnectionError):
                del running[rank]
                told.setdefault(rank, RankEnd(rank=rank, ending="died", seconds=time.monotonic() - begin))
    for rank in running:
        before = told.get(rank)
        message = "" if before is None else f"it did not end behind {before.message or 'its last line'}"
        told[rank] = RankEnd(rank=rank, ending="ran on", seconds=seconds, message=message)
    return told


def _with_log(end: RankEnd, folder: Path, warning: str) -> RankEnd:
    """A process that died cannot say why: its last lines do. One that was wrong may have said so before."""
    log = folder / f"rank-{end.rank}.log"
    if end.ending == "raised wrong" and warning and log.exists():
        found = re.search(f".*{warning}.*", log.read_text(errors="replace"))
        return end if found is None else replace(end, ending="warned", message=found[0])
    if end.ending != "died" or not log.exists():
        return end
    last = " ".join(log.read_text(errors="replace").split())[-PART_OF_A_LOG:]
    return RankEnd(rank=end.rank, ending="died", seconds=end.seconds, message=last)
