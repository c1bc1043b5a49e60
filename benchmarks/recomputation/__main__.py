"""autopar's recomputation beside Checkmate's exact program, DTR and the square-root rule.

    python -m benchmarks.recomputation [--limit SECONDS] [--write]

Small networks on one device (`models.py`), at parts of what the step holds where nothing runs again. Every method's
schedule is judged by the same sum of live bytes (`step_graph.py`), autopar's as its lowered program runs. A row has the
seconds that run again, over those of the step without; null where a method does not fit. Least flattering first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.passes.lowering.chain import join_kernels, lowered_step
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from benchmarks.recomputation.checkmate import checkmate
from benchmarks.recomputation.heuristics import dtr, square_root
from benchmarks.recomputation.models import MODELS, program_of, step_graph
from benchmarks.recomputation.step_graph import Schedule, StepGraph
from benchmarks.results import commit, write_results

RESULTS = Path(__file__).parents[1] / "results" / "recomputation.json"
SHARES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TOLERANCE = 1e-9
NUMBERS = 8
"""Bytes: a lowered program holds the gradient of the loss until it is expanded, which a step graph leaves out."""


def request(memory_limit: float | None = None) -> Request:
    """One device of the preset, no micro-batches."""
    cluster = Cluster.parse("1 cpu")
    return Request(cluster=cluster, with_baselines=False, micro_batches=1, memory_limit=memory_limit)


def schedule_of(program: Program, plan: Plan, graph: StepGraph) -> Schedule:
    """The operators in the order of the lowered program of a plan."""
    lowered = lowered_step(program, plan, 0, until=join_kernels).only.program
    halves = split_forward_backward(lowered, plan.recomputed, plan.recomputed_at)
    number = {name: index for index, name in enumerate(graph.names)}
    found: list[int] = []
    for half in (halves.forward, halves.backward):
        for node in half.graph.nodes if half is not None else ():
            operator = number.get(str(node.meta.get("operator")))
            if node.op == "call_function" and operator is not None and "getitem" not in node.name:
                found.append(operator)
    return (*found, len(graph.names) - 1)


def autopar_schedule(program: Program, graph: StepGraph, budget_bytes: float, beside: float) -> Schedule | None:
    """Of the plan under a limit of the budget and the states. beside: bytes of the states and the batch."""
    try:
        plan = make_plan(program, request(budget_bytes + beside))
    except InfeasibleError as error:
        print(f"    autopar: {error}")
        return None
    return schedule_of(program, plan, graph)


def bytes_beside(program: Program, graph: StepGraph) -> float:
    """What the plan without reruns holds beside its values: states, the batch, and numbers of the loss."""
    return make_plan(program, request()).predicted.peak_bytes - graph.peak_bytes(graph.once) + NUMBERS


def rows_of(name: str, limit_seconds: float) -> list[dict[str, Any]]:
    """One row per budget."""
    program = program_of(name)
    graph = step_graph(program, request())
    whole = graph.peak_bytes(graph.once)
    beside = bytes_beside(program, graph)
    rows = []
    for share in SHARES:
        budget = share * whole
        found = {
            "autopar": autopar_schedule(program, graph, budget, beside),
            "dtr": dtr(graph, budget),
            "square_root": square_root(graph),
        }
        fits = [each for each in found.values() if each and graph.peak_bytes(each) <= budget]
        hint = min(fits, key=graph.extra_seconds, default=None)
        exact = checkmate(graph, budget, limit_seconds, hint, forward_only=True)
        found["checkmate"] = exact.schedule
        again = {method: _again(graph, schedule, budget) for method, schedule in found.items()}
        row = {
            "model": name, "operators": len(graph.names), "share": share, "budget_bytes": budget,
            "step_s": sum(graph.seconds), "again": again, "checkmate_proven": exact.is_proven,
            "checkmate_bound": None if exact.is_proven else exact.bound_seconds / sum(graph.seconds),
        }  # fmt: skip
        print(_line(row), flush=True)
        rows.append(row)
    return rows


def _again(graph: StepGraph, schedule: Schedule | None, budget: float) -> float | None:
    """Seconds that run again over those of the step, None where the schedule holds more than the budget."""
    if schedule is None or graph.peak_bytes(schedule) > budget * (1 + TOLERANCE):
        return None
    return max(0.0, graph.extra_seconds(schedule) / sum(graph.seconds))


def excess(row: dict[str, Any]) -> float:
    """How far autopar is above Checkmate, as a part of the step; infinite where only Checkmate fits."""
    own, best = row["again"]["autopar"], row["again"]["checkmate"]
    if best is None:
        return float("-inf")
    return float("inf") if own is None else float(own - best)


def _line(row: dict[str, Any]) -> str:
    cells = [f"{m} {'does not fit' if x is None else f'{x:.2%}'}" for m, x in row["again"].items()]
    proof = "" if row["checkmate_proven"] else f" (not proven, bound {row['checkmate_bound']:.2%})"
    return f"{row['model']} at {row['share']:.0%}: " + ", ".join(cells) + proof


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a program of Checkmate's may take")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = [row for name in MODELS for row in rows_of(name, arguments.limit)]
    rows.sort(key=excess, reverse=True)
    print("\nleast flattering first:", *map(_line, rows), sep="\n")
    if arguments.write:
        command = f"python -m benchmarks.recomputation --limit {arguments.limit:g} --write"
        write_results(RESULTS, {"command": command, "commit": commit(), "rows": rows})


if __name__ == "__main__":
    main()
