"""A setting's row: every way with what was predicted beside what was measured, and who won.

    loads            parts of all rows that the experts of every layer have; "assumed" says what plans are priced with:
                     these ("measured"), or as many rows for every expert ("uniform")
    blind_seconds    of the plan that is chosen where nothing is said of a load that is not even
    bytes_errors     of all bytes between nodes in a step
    busiest_errors   of the bytes that the busiest link carries: a node's, out or in

goals: the choice within 1.05 of the best measured way of ours, bytes to 1 %, the busiest link to 5 %.

How much a dispatch sends to whom is up to the router. Predictions take it that the rows of every rank go to the experts
in these parts, in every step; weights learn meanwhile, and ranks do not route quite alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import AutoparError
from benchmarks.expert_parallelism.alternatives import BLIND
from benchmarks.plan_quality.bootstrap import slowdown
from benchmarks.plan_quality.plans import CHOSEN, twin_of
from benchmarks.plan_quality.rows import LOSS_TOLERANCE, loss_difference, ranking, reference_losses
from benchmarks.plan_quality.summary import AS_GOOD, bytes_error

BYTES_ERROR, BUSIEST_ERROR = 0.01, 0.05
Run = Mapping[str, Any]


def row(
    runs: Sequence[dict[str, Any]],
    left_out: Mapping[str, str],
    loads: Sequence[Sequence[float]],
    ranks: int,
    assumed: str = "uniform",
) -> dict[str, Any]:
    """What a setting says; the caller adds name, network and machine. runs: fastest first; loads: by layer and expert;
    ranks: over which experts lie in blocks where rows are dispatched; assumed: the load that plans are priced with.

    Raises AutoparError where our choice did not run, or its losses differ from those of most."""
    reference = reference_losses(runs)
    right = [run for run in runs if loss_difference(run["losses"], reference) <= LOSS_TOLERANCE]
    ours = {run["name"]: run for run in right if run["predicted"] is not None}
    if CHOSEN not in ours:
        raise AutoparError(f"the plan that autopar chose is not among the runs that count: {dict(left_out)}")
    chosen, best = ours[CHOSEN], min(ours.values(), key=lambda run: float(run["seconds"]))
    against = slowdown(chosen["steps"], best["steps"])
    return {
        "chosen": chosen["plan"],
        "chosen_seconds": chosen["seconds"],
        "best": best["name"],
        "best_seconds": best["seconds"],
        "slowdown_to_best": against.ratio,
        "significantly_slower": best is not chosen and against.significant,
        "blind_seconds": _blind_seconds(ours, left_out),
        "by_hand_seconds": {run["name"]: run["seconds"] for run in right if run["predicted"] is None},
        "kendall_tau": ranking(list(ours.values())),
        "bytes_errors": {name: bytes_error(run) for name, run in ours.items()},
        "busiest_errors": {name: busiest_error(run) for name, run in ours.items()},
        "wrong_losses": [run["name"] for run in runs if run not in right],
        "left_out": dict(left_out),
        "loads": {"assumed": assumed, "experts": loads, "busiest_rank_over_mean": busiest_rank(loads, ranks)},
        "runs": list(runs),
    }


def _blind_seconds(ours: Mapping[str, Run], left_out: Mapping[str, str]) -> float | None:
    """Of the plan that was chosen blind, or of the equal one that ran; None where there is none."""
    name: str | None = BLIND
    while name is not None and name not in ours:
        name = twin_of(left_out.get(name, ""))
    return None if name is None else float(ours[name]["seconds"])


def busiest(links: Sequence[Sequence[float]]) -> float:
    """The most bytes that a node's link carries in one direction. links: [from][to]."""
    return max(*map(sum, links), *map(sum, zip(*links, strict=True)))


def busiest_error(run: Run) -> float | None:
    """Of what the busiest link carries, relative to the prediction; None where nothing was to be sent."""
    said = busiest(run["predicted"]["link_bytes"])
    return abs(busiest(run["link_bytes"]) / said - 1.0) if said else None


def busiest_rank(loads: Sequence[Sequence[float]], ranks: int) -> float:
    """How many times its even part of a layer's rows some rank has, if each holds a block of the experts."""
    held = len(loads[0]) // ranks
    return max(ranks * sum(layer[rank * held : (rank + 1) * held]) for layer in loads for rank in range(ranks))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All settings in a few numbers, those beside their goals first."""
    runs = [run for row in rows for run in row["runs"] if run["predicted"] is not None]
    steps = [abs(run["predicted"]["seconds"] / run["seconds"] - 1.0) for run in runs]
    over_hand = [min(row["by_hand_seconds"].values()) / row["chosen_seconds"] for row in rows if row["by_hand_seconds"]]
    blind = [row["blind_seconds"] / row["chosen_seconds"] for row in rows if row["blind_seconds"] is not None]
    return {
        "settings": len(rows),
        "choice_within_1.05": sum(row["slowdown_to_best"] <= AS_GOOD for row in rows),
        "choice_as_good_or_not_significantly_slower": sum(
            row["slowdown_to_best"] <= AS_GOOD or not row["significantly_slower"] for row in rows
        ),
        "worst_slowdown_to_best": max((row["slowdown_to_best"] for row in rows), default=None),
        **_within("bytes", 1, rows, "bytes_errors", BYTES_ERROR),
        **_within("busiest_link", 5, rows, "busiest_errors", BUSIEST_ERROR),
        "median_blind_to_chosen": statistics.median(blind) if blind else None,
        "worst_blind_to_chosen": min(blind, default=None),
        "median_step_error": statistics.median(steps) if steps else None,
        "median_speedup_to_by_hand": statistics.median(over_hand) if over_hand else None,
        "wrong_losses": {row["name"]: row["wrong_losses"] for row in rows if row["wrong_losses"]},
    }


def _within(what: str, percent: int, rows: Sequence[Mapping[str, Any]], key: str, goal: float) -> dict[str, Any]:
    errors = [error for row in rows for error in row[key].values() if error is not None]
    return {
        f"{what}_within_{percent}_percent": f"{sum(error <= goal for error in errors)} of {len(errors)}",
        f"worst_{what}_error": max(errors, default=None),
    }
