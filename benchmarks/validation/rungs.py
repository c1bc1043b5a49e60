"""Rungs of the memory ladder in published runs: what backward computes again, what waits in the memory of the host.

    rungs_of(schema, rows)            # ["recomputed", "recomputed", None]
    list(compared(schema, rows))      # [(1, 0)]: row 1 over row 0, 1.39 predicted and 1.29 measured

A row of a rung is scored among those of its kind, and apart. What the rung itself costs is a ratio: rows of a file
whose runs differ in their rung alone (sequence parallelism aside, which Korthikanti et al. introduce with it) stand
over the row that computes least again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from benchmarks.validation.fields import Row, Unpredictable
from benchmarks.validation.rows import training_run
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Schema

Rung: TypeAlias = Literal["recomputed", "offloaded"]
RUNGS: tuple[Rung, ...] = ("recomputed", "offloaded")
_DEGREES = ("none", "selective", "full")
_ASKED = ("quantity", "rank")
"""Columns that say which value of a run a row holds."""


def rung_of(run: TrainingRun) -> Rung | None:
    """What a run does for memory; None: nothing. What recomputes and offloads counts as offloaded."""
    if run.stack.offload_activations:
        return "offloaded"
    return None if run.parallel.recompute == "none" else "recomputed"


def rungs_of(schema: Schema, rows: Sequence[Row]) -> list[Rung | None]:
    """Of every row; None too where a row says too little of its run."""
    return [None if run is None else rung_of(run) for run in _runs(schema, rows)]


def compared(schema: Schema, rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """(row, row of the same run that recomputes least), for rows whose runs differ in their rung."""
    groups: dict[object, list[tuple[int, TrainingRun]]] = {}
    for index, run in enumerate(_runs(schema, rows)):
        if run is not None:
            key = (*(rows[index].get(column) for column in _ASKED), _without_rung(run))
            groups.setdefault(key, []).append((index, run))
    for members in groups.values():
        first, least = min(members, key=lambda member: _degree(member[1]))
        yield from ((index, first) for index, run in members if _degree(run) != _degree(least))


def _runs(schema: Schema, rows: Sequence[Row]) -> Iterator[TrainingRun | None]:
    for row in rows:
        try:
            yield training_run(schema, schema.inputs_of(row))
        except Unpredictable:
            yield None


def _without_rung(run: TrainingRun) -> object:
    parallel = replace(run.parallel, recompute="none", recompute_modules=(), sequence_parallel=False)
    stack = replace(run.stack, offload_activations=False)
    return (run.model, parallel, stack, run.cluster.fingerprint, run.adapter_rank)


def _degree(run: TrainingRun) -> tuple[bool, int, tuple[str, ...]]:
    parallel = run.parallel
    modules = parallel.recompute_modules if parallel.recompute == "selective" else ()
    return run.stack.offload_activations, _DEGREES.index(parallel.recompute), modules
