"""Scores of predictions against measurements: one per kind, file and tier, beside the naive baseline's.

    score_all(folder(), ("op",), progress)      # [Score(kind="operator", file="op_vidur_linear", tier="t0", ...), ...]

The interval is bootstrapped over groups of rows (same model, same device); errors of different kinds are never mixed.
A row without a prediction is counted in `rows` but not in `scored`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from benchmarks.validation import five_constants, metrics
from benchmarks.validation.answers import MIB, ran_out
from benchmarks.validation.data import Table, dev_tables
from benchmarks.validation.fields import Unpredictable, number
from benchmarks.validation.naive import naive
from benchmarks.validation.predict import predict_tiers
from benchmarks.validation.rows import training_run
from benchmarks.validation.rungs import RUNGS, compared, rungs_of
from benchmarks.validation.schemas import TIERS, Kind, Predicted

NAIVE, FIVE_CONSTANTS = "naive", "five constants"
"""What stands beside the tiers of `schemas.py`: the baseline without constants, and that with five fitted ones."""

TOGETHER = "all"
"""The file column of a kind's score over all its files."""

SMALL_BYTES, LARGE_BYTES = 256 * 2**10, 16 * MIB
"""Borders of the three bins of collectives."""

Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How wrong one tier is on one file."""

    kind: str
    file: str
    tier: str
    """t0, t1, physics, naive or five constants."""
    rows: int
    scored: int
    error: float
    """Headline: median absolute percentage error as a fraction; OOM: balanced accuracy; ranking: mean tau-b;
    bubble rates: mean absolute error in points."""
    low: float
    high: float
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """One row with both values."""

    predicted: float
    measured: float
    group: tuple[str, ...]


def score_all(data: Path, kinds: Sequence[Kind], progress: Progress) -> list[Score]:
    """Every file of every kind, in all tiers and by the baselines; then each kind over all its files."""
    scores: list[Score] = []
    for kind in kinds:
        tables = dev_tables(data, kind)
        together: dict[tuple[str, str], list[Pair]] = {}
        for table in tables:
            for tier, predictions in _predictions(table, kind, progress).items():
                for label, pairs, rows in _parts(table, kind, predictions):
                    together.setdefault((label, tier), []).extend(pairs)
                    scores.extend(score_pairs(label, table.name, tier, pairs, rows))
                scores.extend(_rankings(table, kind, tier, predictions))
        if len(tables) > 1:
            for (label, tier), pairs in together.items():
                scores.extend(score_pairs(label, TOGETHER, tier, pairs, len(pairs)))
    return scores


def _predictions(table: Table, kind: Kind, progress: Progress) -> dict[str, list[Predicted]]:
    """By tier and baseline; a baseline that says nothing of this kind of file is left out."""
    with progress(f"{table.name}, {kind}", len(table.rows)) as done:
        told: dict[str, list[Predicted]] = dict(predict_tiers(table, kind, TIERS, done).items())
    told[NAIVE] = naive([table.schema.inputs_of(row) for row in table.rows], table.schema, kind)
    if kind == "step" and table.schema.ranked_within:
        told[FIVE_CONSTANTS] = _five_constants(table)
    return told


def _five_constants(table: Table) -> list[Predicted]:
    """The fitted floor of a file whose plans compete, each half of its groups by constants of the other half."""
    schema = table.schema
    (column, unit), *_ = schema.measured["step"].items()
    seconds = {"ms": 1e-3, "s": 1.0}[unit]
    runs = [training_run(schema, schema.inputs_of(row)) for row in table.rows]
    measured = [seconds * number(row, column) for row in table.rows]
    groups = [tuple(row[name] for name in schema.ranked_within) for row in table.rows]
    told = five_constants.held_out(runs, measured, groups)
    return [Predicted(values={column: value / seconds}) for value in told]


def _parts(table: Table, kind: Kind, predictions: Sequence[Predicted]) -> Iterator[tuple[str, list[Pair], int]]:
    """(label, pairs, rows): collectives by size, pipelines by measured column, all others at once; of training runs
    those that recompute or offload stand apart once more."""
    if kind == "oom":
        pairs = [
            Pair(float(not ran_out(str(predicted.values["outcome"]))), float(not ran_out(row["outcome"])), group)
            for row, predicted, group in _grouped(table, predictions)
            if row.get("outcome") and "outcome" in predicted.values
        ]
        yield "OOM", pairs, len(table.rows)
    elif kind == "pipeline":
        for column in table.schema.measured[kind]:
            label = {"b": "pipeline bubble", "s": "pipeline samples/s", "p": "pipeline memory"}[column[0]]
            of_column = [pair for _, pair in _pairs(table, (column,), predictions)]
            yield label, of_column, sum(1 for row in table.rows if row.get(column))
    elif kind == "collective":
        bins: dict[str, list[Pair]] = {}
        for row, pair in _pairs(table, tuple(table.schema.measured[kind]), predictions):
            bins.setdefault(_bin(row), []).append(pair)
        for label, members in sorted(bins.items()):
            yield label, members, sum(1 for row in table.rows if _bin(row) == label)
    else:
        pairs = [pair for _, pair in _pairs(table, tuple(table.schema.measured[kind]), predictions)]
        label = {"op": "operator", "memory": "memory", "step": "step time", "attention": "shared attention"}[kind]
        yield label, pairs, _measured_rows(table, kind)
        if kind in ("memory", "step"):
            yield from _ladder(table, kind, predictions)


def _ladder(
    table: Table, kind: Literal["memory", "step"], predictions: Sequence[Predicted]
) -> Iterator[tuple[str, list[Pair], int]]:
    """The rows that recompute, those that offload, and what the rung itself makes of a row's value."""
    columns = tuple(table.schema.measured[kind])
    pairs = dict(_by_row(table, columns, predictions))
    rungs = rungs_of(table.schema, table.rows)
    for rung in RUNGS:
        rows = [index for index, row in enumerate(table.rows) if rungs[index] == rung and first_measured(row, columns)]
        yield f"{kind}, {rung}", [pairs[index] for index in rows if index in pairs], len(rows)
    ratios = [
        Pair(pairs[index].predicted / pairs[least].predicted, pairs[index].measured / pairs[least].measured, group)
        for index, least in compared(table.schema, table.rows)
        if index in pairs and least in pairs
        for group in [pairs[index].group]
    ]
    yield f"{kind}, over that without the rung", ratios, len(ratios)


def _measured_rows(table: Table, kind: Kind) -> int:
    return sum(1 for row in table.rows if first_measured(row, tuple(table.schema.measured[kind])) is not None)


def _bin(row: Mapping[str, str]) -> str:
    """The bin of a collective's bytes; rates without a size count as large, as their sources mean them."""
    try:
        nbytes = number(row, "msg_bytes") if "msg_bytes" in row else number(row, "size_mb") * MIB
    except Unpredictable:
        nbytes = LARGE_BYTES + 1.0
    if nbytes < SMALL_BYTES:
        return "collective small"
    return "collective mid" if nbytes <= LARGE_BYTES else "collective large"


def _grouped(
    table: Table, predictions: Sequence[Predicted]
) -> Iterator[tuple[Mapping[str, str], Predicted, tuple[str, ...]]]:
    for row, predicted in zip(table.rows, predictions, strict=True):
        yield row, predicted, (table.name, *(row.get(column, "") for column in table.schema.groups))


def first_measured(row: Mapping[str, str], columns: Sequence[str]) -> tuple[str, float] | None:
    """The first measured column of a row that has a value other than 0, and the value."""
    for column in columns:
        try:
            value = number(row, column)
        except Unpredictable:
            continue
        if value:
            return column, value
    return None


def _pairs(
    table: Table, columns: Sequence[str], predictions: Sequence[Predicted]
) -> Iterator[tuple[Mapping[str, str], Pair]]:
    for index, pair in _by_row(table, columns, predictions):
        yield table.rows[index], pair


def _by_row(
    table: Table, columns: Sequence[str], predictions: Sequence[Predicted]
) -> Iterator[tuple[int, Pair]]:
    for index, (row, predicted, group) in enumerate(_grouped(table, predictions)):
        measured = first_measured(row, columns)
        if measured is None:
            continue
        told = predicted.values.get(measured[0])
        if isinstance(told, float | int):
            yield index, Pair(float(told), measured[1], group)


def score_pairs(kind: str, file: str, tier: str, pairs: Sequence[Pair], rows: int) -> list[Score]:
    """The score of one part of a file; none where nothing was predicted."""
    if not pairs:
        return [
            Score(kind=kind, file=file, tier=tier, rows=rows, scored=0, error=np.nan, low=np.nan, high=np.nan)
        ] * bool(rows)
    predicted = [pair.predicted for pair in pairs]
    measured = [pair.measured for pair in pairs]
    groups = [pair.group for pair in pairs]
    values, statistic, details = _errors(kind, predicted, measured)
    interval = metrics.bootstrap(values, groups, statistic)
    return [
        Score(
            kind=kind, file=file, tier=tier, rows=rows, scored=len(pairs), error=statistic(np.asarray(values)),
            low=interval.low, high=interval.high, details=details,
        )
    ]  # fmt: skip


def _errors(
    kind: str, predicted: Sequence[float], measured: Sequence[float]
) -> tuple[list[float], Callable[[metrics.Floats], float], dict[str, float]]:
    """Errors of rows, the statistic over them that is the headline, and what stands beside it."""
    if kind == "OOM":
        fits, truth = [value > 0.5 for value in predicted], [value > 0.5 for value in measured]
        coded = [float(told == true) + 2.0 * true for told, true in zip(fits, truth, strict=True)]
        return coded, _balanced, {"false_fits": metrics.false_rate(fits, truth)}
    if kind == "pipeline bubble":
        points = [100 * abs(told - true) for told, true in zip(predicted, measured, strict=True)]
        return points, lambda drawn: float(np.mean(drawn)), {"largest_points": max(points)}
    relative = metrics.relative_errors(predicted, measured)
    errors = np.abs(relative)
    ratios = np.log(np.maximum(np.asarray(predicted), 1e-30) / np.asarray(measured))
    details = {
        "p90": float(np.quantile(errors, 0.9)),
        "within_10_percent": float(np.mean(errors <= 0.1)),
        "median_log_ratio": float(np.median(ratios)),
    }
    if kind.split(",")[0] == "memory":
        details["largest_under_prediction"] = metrics.largest_under_prediction(predicted, measured)
        details["under_by_2_percent"] = float(np.mean(relative < -0.02))
    return errors.tolist(), lambda drawn: float(np.median(drawn)), details


def _balanced(coded: metrics.Floats) -> float:
    """Balanced accuracy of rows coded as (right or wrong) + 2 x (measured to fit)."""
    right, truth = coded % 2 > 0.5, coded > 1.5
    return metrics.balanced_accuracy((right == truth).tolist(), truth.tolist())


def _rankings(table: Table, kind: Kind, tier: str, predictions: Sequence[Predicted]) -> list[Score]:
    """The score of a file whose rows compete, from its predicted times."""
    if kind not in ("step", "attention") or not table.schema.ranked_within:
        return []
    ((column, unit), *_) = table.schema.measured[kind].items()
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row, predicted in zip(table.rows, predictions, strict=True):
        told = predicted.values.get(column)
        if row.get(column) and isinstance(told, float | int):
            key = tuple(row[name] for name in table.schema.ranked_within)
            pair = (float(told), float(row[column]))
            groups.setdefault(key, []).append((1 / pair[0], 1 / pair[1]) if unit == "calls/s" else pair)
    return score_ranking(table.name, tier, len(table.rows), groups)


def score_ranking(
    file: str, tier: str, rows: int, groups: Mapping[tuple[str, ...], Sequence[tuple[float, float]]]
) -> list[Score]:
    """Mean tau-b, mean regret of the first pick and share of groups whose best is among the first three.

    A prediction that says the same of every plan of a group ranks nothing: its tau counts as 0.
    """
    columns = [tuple(zip(*group, strict=True)) for group in groups.values() if len(group) > 1]
    if not columns:
        return []
    taus = np.nan_to_num([metrics.kendall_tau_b(told, true) for told, true in columns])
    interval = metrics.bootstrap(taus.tolist(), range(len(taus)), lambda drawn: float(np.mean(drawn)))
    details = {
        "regret": float(np.mean([metrics.first_pick_regret(told, true) for told, true in columns])),
        "top_3": float(np.mean([metrics.best_among_first(told, true) for told, true in columns])),
        "groups": float(len(columns)),
    }
    return [
        Score(
            kind="plan ranking", file=file, tier=tier, rows=rows, scored=sum(len(told) for told, _ in columns),
            error=float(np.mean(taus)), low=interval.low, high=interval.high, details=details,
        )
    ]  # fmt: skip
