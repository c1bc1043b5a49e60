"""Predicting every row of a table: each kind has one module, which sees the inputs of the rows and nothing else.

predictions = predict_table(read_table("IN.csv"), "step", "t0", progress)
write_predictions("OUT.csv", table, "step", predictions)      # adds predicted_iter_time_ms and reason
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence

from autopar.errors import AutoparError
from benchmarks.validation.data import Table, write_table
from benchmarks.validation.rows import program_key
from benchmarks.validation.schemas import Kind, Predicted, Schema, Tier

Predictor = Callable[[Sequence[Mapping[str, str]], Schema, Tier], list[Predicted]]

_PREDICTORS: Mapping[Kind, tuple[str, str]] = {
    "op": ("operators", "predict"),
    "collective": ("collectives", "predict"),
    "memory": ("training", "predict_memory"),
    "oom": ("oom", "predict"),
    "step": ("training", "predict_step"),
    "pipeline": ("pipelines", "predict"),
    "attention": ("shared_attention", "predict"),
}
"""Module and function of each kind; loaded when asked for, since only the training kinds pay for importing torch."""

_CALLS = 50
"""A table is predicted in about this many calls, so that the progress bar moves."""

REASON = "reason"

_BROKEN = (ArithmeticError, AutoparError, LookupError, RuntimeError, ValueError)
"""What a model raises on a row of sizes or names that nobody foresaw. Others are faults of ours and end the run."""


def predicted_column(measured: str) -> str:
    """Name of the column that holds the prediction of a measured column."""
    return f"predicted_{measured}"


def predictor_of(kind: Kind) -> Predictor:
    """The function that predicts rows of this kind."""
    module, function = _PREDICTORS[kind]
    predictor: Predictor = getattr(importlib.import_module(f"benchmarks.validation.{module}"), function)
    return predictor


def predict_table(
    table: Table, kind: Kind, tier: Tier, progress: Callable[[int], None] = lambda done: None
) -> list[Predicted]:
    """One prediction per row, in order; `progress` hears how many rows are done. The measured columns stay unseen."""
    return predict_tiers(table, kind, (tier,), progress)[tier]


def predict_tiers(
    table: Table, kind: Kind, tiers: Sequence[Tier], progress: Callable[[int], None] = lambda done: None
) -> dict[Tier, list[Predicted]]:
    """The same in several tiers, which share the program of a row."""
    predictor = predictor_of(kind)
    inputs = [table.schema.inputs_of(row) for row in table.rows]
    order = _order(inputs, table.schema, kind)
    predictions: dict[Tier, dict[int, Predicted]] = {tier: {} for tier in tiers}
    size = max(1, math.ceil(len(inputs) / _CALLS))
    for start in range(0, len(inputs), size):
        part = order[start : start + size]
        for tier, rows in predictions.items():
            found = _predicted(predictor, [inputs[row] for row in part], table.schema, tier)
            assert len(found) == len(part), "a predictor returns one prediction per row"
            rows.update(zip(part, map(_finite, found), strict=True))
        progress(start + len(part))
    return {tier: [rows[row] for row in range(len(inputs))] for tier, rows in predictions.items()}


def _order(inputs: Sequence[Mapping[str, str]], schema: Schema, kind: Kind) -> list[int]:
    """Rows of training runs by the program that they execute, so that each is made once; others as they come."""
    rows = range(len(inputs))
    if kind in ("op", "collective", "pipeline", "attention"):
        return list(rows)
    return sorted(rows, key=lambda row: (program_key(schema, inputs[row]), row))


def _predicted(predictor: Predictor, part: Sequence[Mapping[str, str]], schema: Schema, tier: Tier) -> list[Predicted]:
    """The predictions of some rows. A row on which a model breaks gets that as its reason and spares the others."""
    try:
        return predictor(part, schema, tier)
    except _BROKEN as error:
        if len(part) == 1:
            return [Predicted(reason=f"{type(error).__name__}: {error}")]
        return [one for row in part for one in _predicted(predictor, [row], schema, tier)]


def write_predictions(path: str | os.PathLike[str], table: Table, kind: Kind, predictions: Sequence[Predicted]) -> None:
    """Write each row with `predicted_<measured column>` for every measured column of the kind, and `reason`."""
    measured = list(table.schema.measured[kind])
    added = [*map(predicted_column, measured), REASON]
    columns = [column for column in table.columns if column not in added]
    rows = [
        {
            **{column: row[column] for column in columns},
            **{predicted_column(column): _text(predicted.values.get(column)) for column in measured},
            REASON: predicted.reason,
        }
        for row, predicted in zip(table.rows, predictions, strict=True)
    ]
    write_table(path, [*columns, *added], rows)


def _finite(predicted: Predicted) -> Predicted:
    """The prediction without values that no measurement can have; says so where nothing is left."""
    values = {
        column: value for column, value in predicted.values.items() if isinstance(value, str) or math.isfinite(value)
    }
    reason = predicted.reason or ("" if values else "the model gives no finite value")
    return Predicted(values=values, reason=reason)


def _text(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.9g}"
