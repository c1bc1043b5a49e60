"""The published rows that tell what a rung of the memory ladder costs, each with its prediction.

    rung_rows(table, "step")       # [{"row": 8, "rung": "recomputed", "predicted": 1.48, "measured": 1.42, ...}, ...]

These are rows beside which the same run stands without the rung, and all that offload: a minute, where
`python -m benchmarks.validation` takes all files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.validation.data import Table, dev_tables
from benchmarks.validation.fields import Unpredictable
from benchmarks.validation.predict import predict_table
from benchmarks.validation.rows import training_run
from benchmarks.validation.rungs import compared, rungs_of
from benchmarks.validation.schemas import Tier
from benchmarks.validation.score import first_measured

KINDS: tuple[Literal["step", "memory"], ...] = ("step", "memory")
UNSCORED: Mapping[str, str] = {
    "flexgen_t4_throughput": "generation with a cache of keys: no training step, and no plan of ours",
    "deepspeed_published": "sizes that fit and lower bounds of TFLOP/s, without batch, sequence or layers: nothing to "
    "be off from; benchmarks.offload_paper stands beside them",
}
"""Files of the collection that offload, but are not scored, and why."""


def rungs_document(data: Path, tier: Tier) -> dict[str, Any]:
    """Rows by kind, with medians: of the values' errors by rung, and of the ratios' errors."""
    rows = {kind: [row for table in dev_tables(data, kind) for row in rung_rows(table, kind, tier)] for kind in KINDS}
    return {"tier": tier, "scores": {kind: _scores(found) for kind, found in rows.items()}, "rows": rows,
            "not_scored": dict(UNSCORED)}  # fmt: skip


def rung_rows(table: Table, kind: Literal["step", "memory"], tier: Tier = "t0") -> list[dict[str, Any]]:
    """Rows of a table, in its order; a row without a prediction says why."""
    pairs, rungs = dict(compared(table.schema, table.rows)), rungs_of(table.schema, table.rows)
    wanted = {*pairs, *pairs.values(), *(index for index, rung in enumerate(rungs) if rung == "offloaded")}
    columns = tuple(table.schema.measured[kind])
    indices = sorted(index for index in wanted if first_measured(table.rows[index], columns) is not None)
    if not indices:
        return []
    predictions = predict_table(replace(table, rows=tuple(table.rows[index] for index in indices)), kind, tier)
    found: dict[int, dict[str, Any]] = {}
    for index, predicted in zip(indices, predictions, strict=True):
        measured = first_measured(table.rows[index], columns)
        assert measured is not None
        column, value = measured
        told = predicted.values.get(column)
        if told is None and f"kind {'memory' if kind == 'step' else 'step'}" in predicted.reason:
            continue
        found[index] = {
            "file": table.name, "row": index, "rung": rungs[index], "does": _does(table, index), "column": column,
            "measured": value, "predicted": told, **({"reason": predicted.reason} if predicted.reason else {}),
        }  # fmt: skip
    for index, least in pairs.items():
        if index in found and found.get(least, {}).get("predicted") is not None:
            told, measured_ratio = (found[index][key] / found[least][key] for key in ("predicted", "measured"))
            found[index] |= {"over_row": least, "measured_ratio": measured_ratio, "predicted_ratio": told}
    return [found[index] for index in sorted(found)]


def _does(table: Table, index: int) -> str:
    """What a run makes again or moves, in words."""
    try:
        run = training_run(table.schema, table.schema.inputs_of(table.rows[index]))
    except Unpredictable as error:
        return str(error)
    parallel = run.parallel
    modules = ", ".join(parallel.recompute_modules) if parallel.recompute == "selective" else parallel.recompute
    return f"recomputes {modules}{', offloads activations' if run.stack.offload_activations else ''}"


def _scores(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors: dict[str, list[float]] = {}
    for row in rows:
        if row["predicted"] is not None:
            errors.setdefault(row["rung"] or "neither", []).append(abs(row["predicted"] / row["measured"] - 1))
        if "over_row" in row:
            off = abs(row["predicted_ratio"] / row["measured_ratio"] - 1)
            errors.setdefault("over the row without the rung", []).append(off)
    return {
        name: {"rows": len(found), "median_error": median(found), "largest_error": max(found)}
        for name, found in errors.items()
    }
