"""One setting's row of the results: what every run measured, and who won.

A row has name, network, chosen_seconds, predicted_seconds, best_measured_seconds (over all runs),
best_baseline_seconds (the best of DDP, FSDP2 and TP), and `runs`: each with its plan, seconds, steps, bytes per link
and, where the plan is ours, what was predicted beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import AutoparError
from benchmarks.plan_quality.bootstrap import slowdown
from benchmarks.plan_quality.plans import CHOSEN, FORCED, twin_of
from benchmarks.validation.metrics import kendall_tau_b

CLASSIC = {"ddp": ("ddp",), "fsdp2": ("fsdp2", "fsdp2-kept"), "tp": ("tp",)}
"""The baselines that must be beaten, and the runs of each."""
LOSS_TOLERANCE = 1e-5


def measured_runs(
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    warm_up: int,
    plans: Mapping[str, str],
    predicted: Mapping[str, Mapping[str, Any]],
    peaks: Mapping[str, float],
) -> list[dict[str, Any]]:
    """A run per entry of `rows`, fastest first. plans: in words; predicted: of ours."""
    runs = []
    for name, steps in rows.items():
        timed = steps[warm_up:]
        runs.append(
            {
                "name": name,
                "plan": plans[name],
                "seconds": statistics.median(step["seconds"] for step in timed),
                "steps": [step["seconds"] for step in timed],
                "cpu_seconds": statistics.median(max(step["cpu_seconds"]) for step in timed),
                "link_bytes": link_bytes(timed),
                "losses": [step["loss"] for step in steps],
                "exposed_communication_seconds": exposed(timed, predicted.get(name)),
                "peak_bytes": peaks.get(name),
                "predicted": predicted.get(name),
            }
        )
    return sorted(runs, key=lambda run: run["seconds"])


def exposed(steps: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any] | None) -> float | None:
    """Median of the seconds in which the rank that waited longest awaited collectives; None where that is not counted:
    of baselines, and of pipelines, whose waits are bubbles as well."""
    if predicted is None or predicted["is_pipeline"]:
        return None
    return float(statistics.median(max(step["waited_seconds"]) for step in steps))


def link_bytes(steps: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Median payload from node to node."""
    nodes = range(len(steps[0]["sent_bytes"]))
    return [[int(statistics.median(step["sent_bytes"][i][j] for step in steps)) for j in nodes] for i in nodes]


def setting_row(
    name: str,
    network: str,
    runs: Sequence[dict[str, Any]],
    left_out: Mapping[str, str],
    elapsed: Mapping[str, float],
) -> dict[str, Any]:
    """The row. Runs whose losses differ from those of the others count for nothing and are named.

    elapsed: phase -> seconds. Raises AutoparError where our choice, or every classic baseline, is not among the runs
    that count.
    """
    reference = reference_losses(runs)
    wrong = {run["name"]: loss_difference(run["losses"], reference) for run in runs}
    wrong = {run: difference for run, difference in wrong.items() if not difference <= LOSS_TOLERANCE}
    right = {run["name"]: run for run in runs if run["name"] not in wrong}
    if CHOSEN not in right:
        reason = (
            f"its losses differ by {wrong[CHOSEN]:.1e}" if CHOSEN in wrong else left_out.get(CHOSEN, "it did not run")
        )
        raise AutoparError(f"{name}: the plan that autopar chose is not among the runs: {reason}")
    chosen, best = right[CHOSEN], min(right.values(), key=lambda run: float(run["seconds"]))
    classic = [right[run] for runs in CLASSIC.values() for run in runs if run in right]
    if not classic:
        raise AutoparError(f"{name}: neither DDP, FSDP2 nor TP is among the runs: {dict(left_out)}, {wrong}")
    baseline = min(classic, key=lambda run: float(run["seconds"]))
    against_best = slowdown(chosen["steps"], best["steps"])
    against_baseline = slowdown(baseline["steps"], chosen["steps"])
    return {
        "name": name,
        "network": network,
        "chosen_seconds": chosen["seconds"],
        "predicted_seconds": chosen["predicted"]["seconds"],
        "best_measured_seconds": best["seconds"],
        "best_measured": best["name"],
        "best_baseline_seconds": baseline["seconds"],
        "best_baseline": baseline["name"],
        "slowdown_to_best": against_best.ratio,
        "significantly_slower": best is not chosen and against_best.significant,
        "speedup_to_baseline": against_baseline.ratio,
        "significantly_faster": against_baseline.significant,
        "significantly_slower_than_baseline": slowdown(chosen["steps"], baseline["steps"]).significant,
        "runtime_ratios": runtime_ratios(right, left_out),
        "kendall_tau": ranking(list(right.values())),
        "wrong_losses": wrong,
        "left_out": dict(left_out),
        "elapsed_seconds": {phase: round(seconds, 1) for phase, seconds in elapsed.items()},
        "runs": list(runs),
    }


def reference_losses(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Those that most runs agree with: the median of each step's losses."""
    shortest = min(len(run["losses"]) for run in runs)
    return [statistics.median(run["losses"][step] for run in runs) for step in range(shortest)]


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of any step that both have."""
    return max(abs(a / b - 1.0) for a, b in zip(losses, reference, strict=False))


def runtime_ratios(runs: Mapping[str, Mapping[str, Any]], left_out: Mapping[str, str]) -> dict[str, float]:
    """Our seconds over theirs (the faster variant's) where the baseline's own plan is forced on our runtime: its run's,
    or those of an equal plan that ran in its place."""
    ratios = {}
    for kind, variants in CLASSIC.items():
        theirs = [float(runs[name]["seconds"]) for name in variants if name in runs]
        ours = twin_of(left_out.get(FORCED + kind, "")) or FORCED + kind
        if ours in runs and theirs:
            ratios[kind] = float(runs[ours]["seconds"]) / min(theirs)
    return ratios


def ranking(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Kendall's tau of predicted and measured seconds over our plans; None under two plans."""
    ours = [run for run in runs if run["predicted"] is not None]
    if len(ours) < 2:
        return None
    return kendall_tau_b([run["predicted"]["seconds"] for run in ours], [run["seconds"] for run in ours])
