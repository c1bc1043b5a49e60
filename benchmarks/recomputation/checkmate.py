"""Checkmate's exact program (Jain et al., Checkmate, MLSys 2020, equations 1 to 9), by CP-SAT.

    stage t runs operator t, and before it what it runs again     R[t, k]: operator k runs in stage t; R[t, t] = 1
    what stage t finds of earlier ones                            S[t, v] <= S[t-1, v] + R[t-1, maker of v]
    operator k in stage t                                         R[t, k] <= R[t, maker of v] + S[t, v]   v that k reads
    bytes while k may run in stage t                              U[t, k] <= budget
    a value is freed behind its last reader in stage t            FREE[t, k, v]

The objective is the seconds of all R. Values have a row each, since an operator may make several. Sums of bytes are
linear, so U is written out: U[t, k] = sum of S[t, v] + what ran up to k - what was freed before k. Seconds are
counted in whole units (`SECONDS_UNITS`), bytes exactly. Checkmate lets operators of backward run again, too;
`forward_only` takes that away, for a smaller program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ortools.sat.python import cp_model

from benchmarks.recomputation.step_graph import Schedule, StepGraph

SECONDS_UNITS = 1_000_000
"""Of the seconds of all operators once."""


@dataclass(frozen=True, slots=True)
class Exact:
    """schedule: None where none was found; is_proven: that it is the optimum, or that there is none; bound_seconds:
    no schedule has fewer that run again."""

    schedule: Schedule | None
    is_proven: bool
    bound_seconds: float


def checkmate(
    graph: StepGraph,
    budget_bytes: float,
    limit_seconds: float,
    hint: Schedule | None = None,
    *,
    forward_only: bool = False,
) -> Exact:
    """The schedule of fewest seconds within a budget. hint: a schedule that runs every operator at most once in a
    stage, to begin with."""
    program = _Program(graph, budget_bytes, graph.forward if forward_only else len(graph.names))
    if hint is not None:
        program.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_seconds
    solver.parameters.num_workers = 2
    status = solver.solve(program.model)
    if status == cp_model.INFEASIBLE:
        return Exact(None, True, math.inf)
    bound = max(0.0, solver.best_objective_bound * program.second_unit)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(None, False, bound)
    runs = [(t, k) for t in range(program.size) for k in range(t + 1) if solver.value(program.runs[t, k])]
    return Exact(tuple(k for _, k in runs), status == cp_model.OPTIMAL, bound)


class _Program:
    def __init__(self, graph: StepGraph, budget_bytes: float, repeatable: int) -> None:
        self.graph, self.size, self.model = graph, len(graph.names), cp_model.CpModel()
        values, model = range(len(graph.makers)), self.model
        unit = math.gcd(*graph.value_bytes)
        self.units, self.room = [size // unit for size in graph.value_bytes], int(budget_bytes // unit)
        self.readers = [graph.readers(value) for value in values]
        self.second_unit = sum(graph.seconds) / SECONDS_UNITS
        self.runs = {(t, k): model.new_bool_var("") for t in range(self.size) for k in range(t + 1)}
        self.kept = {
            (t, v): model.new_bool_var("") for t in range(self.size) for v in values if graph.makers[v] < t
        }
        for t in range(self.size):
            model.add(self.runs[t, t] == 1)
            self._stage(t)
        again = [(t, k) for t, k in self.runs if k < t]
        for t, k in again:
            if k >= repeatable:
                model.add(self.runs[t, k] == 0)
        weights = [round(graph.seconds[k] / self.second_unit) for _, k in again]
        model.minimize(sum(w * self.runs[key] for w, key in zip(weights, again, strict=True)))

    def _stage(self, t: int) -> None:
        graph, model, runs, kept = self.graph, self.model, self.runs, self.kept
        present = [v for v, maker in enumerate(graph.makers) if maker < t]
        for v in present:
            model.add(kept[t, v] <= kept.get((t - 1, v), 0) + runs[t - 1, graph.makers[v]])
        for k in range(t + 1):
            for v in graph.reads[k]:
                model.add(runs[t, k] <= runs[t, graph.makers[v]] + kept.get((t, v), 0))
        held = cp_model.LinearExpr.sum([self.units[v] * kept[t, v] for v in present])
        for k in range(t + 1):
            made = graph.made(k)
            held += sum(self.units[v] for v in made) * runs[t, k]
            model.add(held <= self.room)
            for v in {*graph.reads[k], *made}:
                held -= self.units[v] * self._freed(t, k, v)

    def _freed(self, t: int, k: int, v: int) -> cp_model.IntVar:
        """Whether v is freed behind k in stage t: k runs, nothing behind it reads v there, and the next stage does not
        find it."""
        freed = self.model.new_bool_var("")
        self.model.add_implication(freed, self.runs[t, k])
        for reader in self.readers[v]:
            if k < reader <= t:
                self.model.add_implication(freed, self.runs[t, reader].negated())
        if (t + 1, v) in self.kept:
            self.model.add_implication(freed, self.kept[t + 1, v].negated())
        return freed

    def hint(self, schedule: Schedule) -> None:
        """Begin with what a schedule runs in every stage."""
        stage, ran = 0, set[tuple[int, int]]()
        for k in schedule:
            ran.add((stage, k))
            stage += k == stage
        for key, variable in self.runs.items():
            self.model.add_hint(variable, key in ran)
