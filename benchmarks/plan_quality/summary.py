"""All settings in a few numbers: how often our choice is the best, how often it beats DDP, FSDP2 and TP, how good the
runtime and the predictions are."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from benchmarks.plan_quality.bootstrap import slowdown
from benchmarks.plan_quality.rows import CLASSIC

AS_GOOD = 1.05
"""A choice within this factor of the best measured plan counts as the best."""
Row = Mapping[str, Any]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts over the settings, medians over settings and runs; None where nothing was measured."""
    ours = [run for row in rows for run in row["runs"] if run["predicted"] is not None]
    return {
        "settings": len(rows),
        "chosen_is_best": sum(row["slowdown_to_best"] <= AS_GOOD or not row["significantly_slower"] for row in rows),
        "faster_than_baselines": sum(row["speedup_to_baseline"] > 1.0 and row["significantly_faster"] for row in rows),
        "ties_with_baselines": sum(tie(row) for row in rows),
        "median_speedup_to_baseline": median(rows, itemgetter("speedup_to_baseline")),
        "median_slowdown_to_best": median(rows, itemgetter("slowdown_to_best")),
        "median_runtime_ratio": {
            kind: median([row["runtime_ratios"] for row in rows if kind in row["runtime_ratios"]], itemgetter(kind))
            for kind in CLASSIC
        },
        "median_step_error": median(ours, lambda run: abs(run["predicted"]["seconds"] / run["seconds"] - 1.0)),
        "median_memory_error": median(
            [run for run in ours if run["peak_bytes"]],
            lambda run: abs(run["predicted"]["peak_bytes"] / run["peak_bytes"] - 1.0),
        ),
        "median_bytes_error": median([run for run in ours if bytes_error(run) is not None], bytes_error),
        "median_kendall_tau": median(
            [row for row in rows if row["kendall_tau"] is not None], lambda r: r["kendall_tau"]
        ),
        "median_kendall_tau_beyond_chance": median(
            [row for row in rows if tau_beyond_chance(row) is not None], tau_beyond_chance
        ),
        "wrong_losses": {row["name"]: row["wrong_losses"] for row in rows if row["wrong_losses"]},
    }


def tie(row: Row) -> bool:
    """Neither our choice nor the best baseline is faster beyond chance."""
    return not row["significantly_faster"] and not row["significantly_slower_than_baseline"]


def bytes_error(run: Row) -> float | None:
    """The relative difference of all bytes on the links; None where none were predicted."""
    said = run["predicted"]["sent_bytes"]
    if not said or not sum(said):
        return None
    return float(abs(sum(map(sum, run["link_bytes"])) / sum(said) - 1.0))


def tau_beyond_chance(row: Row) -> float | None:
    """Kendall's tau of predicted and measured seconds over the pairs of our plans of which one is slower than the other
    beyond chance; None without such a pair."""
    ours = sorted((run for run in row["runs"] if run["predicted"] is not None), key=itemgetter("seconds"))
    pairs = [(a, b) for a, b in itertools.combinations(ours, 2) if slowdown(b["steps"], a["steps"]).significant]
    if not pairs:
        return None
    found = (np.sign(slower["predicted"]["seconds"] - faster["predicted"]["seconds"]) for faster, slower in pairs)
    return float(sum(found)) / len(pairs)


def median(rows: Sequence[Row], value: Callable[[Row], Any]) -> float | None:
    """Of what the rows say; None where there are none."""
    return statistics.median(float(value(row)) for row in rows) if rows else None
