"""The runner: each row on new processes, first as the framework is on one, then with autopar on two."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.frameworks.agreements import Finding, judged
from benchmarks.frameworks.framework_row import CHANGES, PROCESSES, SECONDS, FrameworkRow, Run
from benchmarks.frameworks.row_job import NEEDS
from benchmarks.workers import Pool, WorkerError

JOB = "benchmarks.frameworks.row_job:run_row"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanRow:
    """A row with its verdict, as the results keep it."""

    name: str
    recipe: str
    precision: str
    verdict: str
    says: str
    loss_error: float | None
    weight_error: float | None
    steps: int
    seconds: float
    good: bool

    def as_json(self) -> dict[str, Any]:
        """For the results."""
        return asdict(self)


def pool_for(frameworks: Sequence[str]) -> Pool:
    """Workers that are forked from templates with these frameworks."""
    modules = [f"benchmarks.frameworks.{NEEDS[each][0]}" for each in dict.fromkeys(frameworks)]
    return Pool(PROCESSES, preload=("autopar.api", "transformers.models.gpt2.modeling_gpt2", *modules))


def run_rows(
    rows: Sequence[FrameworkRow], pool: Pool, on_row: Callable[[RanRow], object] = lambda row: None
) -> list[RanRow]:
    """The rows in their order; `on_row` gets each when it has ended."""
    found = []
    for each in rows:
        found.append(ran(each, pool))
        on_row(found[-1])
    return found


def ran(row: FrameworkRow, pool: Pool) -> RanRow:
    """One row, whatever happens in it."""
    begin = time.monotonic()
    alone = "" if row.refused else _runs(row, pool, ours=False)
    finding: Finding = judged(row, alone if isinstance(alone, str) else alone[0], _runs(row, pool, ours=True))
    return RanRow(
        name=row.name, recipe=CHANGES[row.framework], precision=row.precision, verdict=finding.word, says=finding.says,
        loss_error=finding.loss_error, weight_error=finding.weight_error, steps=finding.steps,
        seconds=round(time.monotonic() - begin, 1), good=finding.good,
    )  # fmt: skip


def _without_places(text: str) -> str:
    """Files of packages without the folder in which they are installed."""
    return re.sub(r"/\S+?/(?=(?:accelerate|autopar|benchmarks|lightning|peft|torch|transformers)/)", "", text)


def _runs(row: FrameworkRow, pool: Pool, *, ours: bool) -> list[Run] | str:
    """The run of every rank, or their error, on processes of its own."""
    with tempfile.TemporaryDirectory(prefix="autopar-row-") as folder:
        try:
            found: list[Run] = pool.run(
                JOB, world_size=PROCESSES if ours else 1, timeout=SECONDS, name=row.name, ours=ours, folder=folder
            )
        except WorkerError as error:
            return _without_places(str(error).replace(f"{folder}/", ""))
        finally:
            pool.close()
    return found
