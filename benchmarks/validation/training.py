"""Predicting training runs: rows become runs, and their seconds and bytes come from the planner's own cost models.

predict_step(rows, schema, "t0")          # seconds by road.py, as iter_time_ms, tokens_per_s_per_gpu, ...
predict_memory(rows, schema, "t0")        # bytes by memory.py, as peak_alloc_gib, value_mb, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.errors import AutoparError
from benchmarks.validation.answers import Seconds, Values, memory_values, step_values
from benchmarks.validation.fields import Row, Unpredictable
from benchmarks.validation.memory import ranks
from benchmarks.validation.road import step_seconds
from benchmarks.validation.rows import training_run
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Predicted, Schema, Tier


def predict_step(rows: Sequence[Row], schema: Schema, tier: Tier) -> list[Predicted]:
    """The time columns of every row."""
    return [_answered(row, schema, lambda run, row: step_values(schema, row, run, _timed(tier))) for row in rows]


def predict_memory(rows: Sequence[Row], schema: Schema, tier: Tier) -> list[Predicted]:
    """The memory columns of every row."""
    return [
        _answered(row, schema, lambda run, row: memory_values(schema, row, run, lambda run: ranks(run, tier)))
        for row in rows
    ]


def _timed(tier: Tier) -> Seconds:
    return lambda run: step_seconds(run, tier)


def _answered(row: Row, schema: Schema, answer: Callable[[TrainingRun, Row], Values]) -> Predicted:
    try:
        return Predicted(values=answer(training_run(schema, row), row))
    except (AutoparError, Unpredictable) as error:
        return Predicted(reason=str(error))
