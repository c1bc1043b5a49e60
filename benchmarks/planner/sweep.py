"""Plans over a sweep of memory limits at fixed prices, from roomy to just feasible.

What must hold: the objective rises as the limit falls, every plan's predicted peak is under its limit, and the bound
of a limit is under the objective of every plan that fits it, whatever found it.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from autopar.capture import capture, normalize_example_inputs
from autopar.errors import InfeasibleError
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from benchmarks.models import workload
from benchmarks.planner.cases import NO_LIMIT_BYTES, Case
from benchmarks.planner.measure import cluster_of

FRACTIONS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
"""Of the peak of the plan without a limit; the sweep ends where nothing fits."""


def sweep(case: Case) -> dict[str, Any]:
    """One row per limit, and whether the three promises hold."""
    model, inputs = workload(case.workload, batch=case.batch)
    program = capture(model, *normalize_example_inputs(inputs))
    roomy = _plan(program, case, NO_LIMIT_BYTES).predicted.peak_bytes
    rows: list[dict[str, Any]] = []
    for fraction in FRACTIONS:
        started = time.process_time()
        try:
            plan = _plan(program, case, fraction * roomy)
        except InfeasibleError as error:
            rows.append({"limit_bytes": fraction * roomy, "error": str(error)})
            break
        rows.append(
            {
                "limit_bytes": fraction * roomy,
                "peak_bytes": plan.predicted.peak_bytes,
                "objective_seconds": plan.objective_seconds,
                "bound_seconds": plan.bound_seconds,
                "gap": plan.gap,
                "micro_batches": plan.micro_batches,
                "recomputed_operators": sum(operator.recompute for operator in plan.operators.values()),
                "predicted_step_seconds": plan.predicted.step_seconds,
                "cpu_seconds": time.process_time() - started,
            }
        )
    return {"case": case.name, "rows": rows, "promises": promises([row for row in rows if "error" not in row])}


def promises(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What must hold of rows with falling limits; a plan within a tighter limit also fits the looser ones."""
    pairs = list(itertools.pairwise(rows))
    slack = 1.0 + 1e-9
    return {
        "objective rises": all(a["objective_seconds"] <= b["objective_seconds"] * slack for a, b in pairs),
        "peak under limit": all(row["peak_bytes"] <= row["limit_bytes"] * slack for row in rows),
        "bound under every plan": all(
            looser["bound_seconds"] <= tighter["objective_seconds"] * slack
            for i, looser in enumerate(rows)
            for tighter in rows[i:]
        ),
    }


def _plan(program: Program, case: Case, limit: float) -> Plan:
    request = Request(
        cluster=cluster_of(case.devices),
        mesh=case.mesh,
        optimizer=torch.optim.AdamW,
        memory_limit=limit,
        with_baselines=False,
    )
    return make_plan(program, request)
