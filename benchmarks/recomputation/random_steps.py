"""The planner's fewest reruns, DTR and the square-root rule beside the exact frontier of random steps.

    python -m benchmarks.recomputation.random_steps [--steps 1000] [--nets 30] [--write]

A row per method: at how many of all peaks of all frontiers it finds a schedule that fits, at how many the shortest one,
and by how much it is longer, as a part of the step. Steps are made up, of 6 to 12 operators; nets are captured, planned
under every peak as a limit, and lowered.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from autopar.planner.memory.rerun_program import fewest_reruns
from autopar.planner.memory.reruns import Step, runs_of
from benchmarks.recomputation.__main__ import autopar_schedule, bytes_beside, request
from benchmarks.recomputation.frontier import frontier, random_step
from benchmarks.recomputation.heuristics import dtr, square_root
from benchmarks.recomputation.models import random_program, step_graph
from benchmarks.recomputation.step_graph import Schedule, StepGraph
from benchmarks.results import commit, write_results

RESULTS = Path(__file__).parents[1] / "results" / "recomputation_random.json"
TIME = 5.0
APART = 64
"""Bytes between two limits of a captured net: what is less are numbers of the loss."""
Method: TypeAlias = Callable[[StepGraph, float], Schedule | None]
Row: TypeAlias = dict[str, float | None]


def planned(graph: StepGraph, budget: float) -> Schedule | None:
    """As the planner runs the step."""
    step = Step(
        seconds=graph.seconds,
        reads=graph.reads,
        makers=graph.makers,
        value_bytes=graph.value_bytes,
        forward=graph.forward,
        repeatable=frozenset(range(graph.forward)),
    )
    found = fewest_reruns(step, np.full(len(graph.names), budget), TIME)
    if found is None:
        return None
    again: dict[int, list[int]] = {}
    for late, operator in runs_of(step, found):
        again.setdefault(late, []).append(operator)
    order = [[*again.get(operator, ()), operator] for operator in range(len(graph.names))]
    return tuple(operator for each in order for operator in each)


METHODS: dict[str, Method] = {
    "autopar": planned,
    "dtr": dtr,
    "square_root": lambda graph, budget: square_root(graph),
}


def excesses(graph: StepGraph, methods: Mapping[str, Method] = METHODS, apart: int = 1) -> list[Row]:
    """For every peak of the frontier: by method what it takes above the shortest, as a part of the step; None where it
    does not fit."""
    found = []
    for peak, shortest in frontier(graph, apart):
        row: Row = {}
        for method, ask in methods.items():
            schedule = ask(graph, peak)
            fits = schedule is not None and graph.peak_bytes(schedule) <= peak
            above = graph.extra_seconds(schedule) - shortest if fits and schedule is not None else 0.0
            row[method] = above / sum(graph.seconds) if fits else None
        found.append(row)
    return found


def excesses_of_net(seed: int) -> list[Row]:
    """The same of a net whose plans are lowered."""
    program = random_program(seed)
    graph = step_graph(program, request())
    beside = bytes_beside(program, graph)
    methods = METHODS | {"autopar": lambda graph, budget: autopar_schedule(program, graph, budget, beside)}
    return excesses(graph, methods, APART)


def summary(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """By method, over all peaks."""
    rows, found = list(rows), {}
    for method in METHODS:
        fitting = [above for row in rows if (above := row[method]) is not None]
        longer = sorted(above for above in fitting if above > 1e-9)
        found[method] = {
            "peaks": len(rows), "fits": len(fitting), "shortest": len(fitting) - len(longer),
            "median_above_where_longer": float(np.median(longer)) if longer else 0.0,
            "most_above": longer[-1] if longer else 0.0,
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--nets", type=int, default=30)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = {
        "steps": summary(row for seed in range(arguments.steps) for row in excesses(random_step(seed))),
        "nets": summary(row for seed in range(arguments.nets) for row in excesses_of_net(seed)),
    }
    for kind, methods in found.items():
        for method, numbers in methods.items():
            print(kind, method, numbers)
    if arguments.write:
        counts = f"--steps {arguments.steps} --nets {arguments.nets}"
        command = f"python -m benchmarks.recomputation.random_steps {counts} --write"
        write_results(RESULTS, {"command": command, "commit": commit(), **found})


if __name__ == "__main__":
    main()
