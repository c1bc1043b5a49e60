"""A setting's row: every way with what was predicted beside what was measured, who won, and what closed forms say.

goals: the choice within 1.05 of the best measured way, bytes to 1 %, exposed seconds to 15 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.plan_quality.bootstrap import slowdown
from benchmarks.plan_quality.plans import CHOSEN, FORCED, twin_of
from benchmarks.plan_quality.rows import LOSS_TOLERANCE, loss_difference, ranking, reference_losses
from benchmarks.plan_quality.summary import AS_GOOD, bytes_error

BYTES_ERROR, EXPOSED_ERROR = 0.01, 0.15
Run = Mapping[str, Any]


def with_waits(run: dict[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The run with the seconds that every rank waited for collectives, and those of the rank by which a plan is
    priced: in a causal ring of contiguous blocks the others wait for it. What is not ours stays as it is."""
    if run["predicted"] is None:
        return run
    ranks = range(len(steps[0]["waited_seconds"]))
    waited = [statistics.median(step["waited_seconds"][rank] for step in steps) for rank in ranks]
    return {**run, "waited_seconds": waited, "exposed_communication_seconds": waited[run["predicted"]["priced_rank"]]}


def row(runs: Sequence[dict[str, Any]], left_out: Mapping[str, str], forms: Mapping[str, Any]) -> dict[str, Any]:
    """What a setting says; the caller adds name, network and machine. runs: fastest first."""
    reference = reference_losses(runs)
    right = [run for run in runs if loss_difference(run["losses"], reference) <= LOSS_TOLERANCE]
    ours = {run["name"]: run for run in right if run["predicted"] is not None}
    chosen, best = ours[CHOSEN], min(ours.values(), key=lambda run: float(run["seconds"]))
    by_hand = [run for run in right if run["predicted"] is None]
    against = slowdown(chosen["steps"], best["steps"])
    return {
        "chosen": chosen["plan"],
        "chosen_seconds": chosen["seconds"],
        "best": best["name"],
        "best_seconds": best["seconds"],
        "slowdown_to_best": against.ratio,
        "significantly_slower": best is not chosen and against.significant,
        "best_by_hand_seconds": min((run["seconds"] for run in by_hand), default=None),
        "kendall_tau": ranking(list(ours.values())),
        "bytes_errors": {name: bytes_error(run) for name, run in ours.items()},
        "exposed_errors": {name: exposed_error(run) for name, run in ours.items()},
        "wrong_losses": [run["name"] for run in runs if run not in right],
        "left_out": dict(left_out),
        "closed_forms": forms,
        "measured_winner": winner(ours, left_out),
        "runs": list(runs),
    }


def exposed_error(run: Run) -> float:
    """Of the seconds that the priced rank awaits, relative to what was measured."""
    measured = float(run["exposed_communication_seconds"])
    return abs(float(run["predicted"]["awaited_seconds"]) - measured) / measured


def winner(ours: Mapping[str, Run], left_out: Mapping[str, str]) -> str | None:
    """Which of ring in zigzag order and Ulysses took less; None where one of them did not run."""
    names = {way: f"{FORCED}{run}" for way, run in (("ring", "ring in zigzag"), ("ulysses", "ulysses"))}
    names = {way: twin_of(left_out.get(name, "")) or name for way, name in names.items()}
    if not all(name in ours for name in names.values()):
        return None
    return min(names, key=lambda way: float(ours[names[way]]["seconds"]))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All settings in a few numbers, those beside their goals first."""
    bytes_errors = [error for row in rows for error in row["bytes_errors"].values() if error is not None]
    exposed_errors = [error for row in rows for error in row["exposed_errors"].values()]
    runs = [run for row in rows for run in row["runs"] if run["predicted"] is not None]
    steps = [abs(run["predicted"]["seconds"] / run["seconds"] - 1.0) for run in runs]
    return {
        "settings": len(rows),
        "choice_within_1.05": sum(row["slowdown_to_best"] <= AS_GOOD for row in rows),
        "choice_as_good_or_not_significantly_slower": sum(
            row["slowdown_to_best"] <= AS_GOOD or not row["significantly_slower"] for row in rows
        ),
        "worst_slowdown_to_best": max((row["slowdown_to_best"] for row in rows), default=None),
        "bytes_within_1_percent": f"{sum(e <= BYTES_ERROR for e in bytes_errors)} of {len(bytes_errors)}",
        "worst_bytes_error": max(bytes_errors, default=None),
        "exposed_within_15_percent": f"{sum(e <= EXPOSED_ERROR for e in exposed_errors)} of {len(exposed_errors)}",
        "median_exposed_error": statistics.median(exposed_errors) if exposed_errors else None,
        "median_step_error": statistics.median(steps) if steps else None,
        "median_speedup_to_by_hand": _median(
            [row["best_by_hand_seconds"] / row["chosen_seconds"] for row in rows if row["best_by_hand_seconds"]]
        ),
        "closed_forms_name_the_winner": sum(
            row["measured_winner"] == row["closed_forms"]["zigzag"]["winner"] for row in rows
        ),
    }


def _median(numbers: Sequence[float]) -> float | None:
    return statistics.median(numbers) if numbers else None
