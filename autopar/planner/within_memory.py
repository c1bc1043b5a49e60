"""Within memory: the optimum under the memory limit, found in rounds of solving and measuring.

    round 0   the optimum without a limit: where its lowered program fits, it is the answer; nothing is recomputed
    round 1   the problem with recomputation (`recomputation.py`) and one row per moment (`memory_rows.py`), with the
              transients that round 0 showed
    round 2   the same with the transients of round 1, should its program hold more than the limit

So the limit holds for the program that runs, whatever the rows leave out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.layout import Mesh
from autopar.phases import phase
from autopar.plan_text import format_bytes
from autopar.planner.build import Built
from autopar.planner.lifetimes import Lifetimes
from autopar.planner.memory_rows import Moment, memory_rows, modelled_bytes
from autopar.planner.query import Query
from autopar.planner.recomputation import DROPPED, RECOMPUTED, SAVED, expand, with_states
from autopar.planner.shortage import DoesNotFit, fullest_parts
from autopar.planner.solver import (
    MemoryRow,
    Problem,
    Solution,
    Status,
    check_certificate,
    evaluate,
    is_forbidden,
    solve,
)
from autopar.planner.targets import recompute_of

MEMORY_GAP = 1e-3
Labels = NDArray[np.int64]


@dataclass(slots=True)
class WithinMemory:
    """The rounds of one mesh. built: the problem in which labels are to be read. starts: assignments of the plain
    problem from which the search may begin."""

    query: Query
    mesh: Mesh
    plain: Built
    built: Built
    lifetimes: Lifetimes
    starts: Sequence[Labels]
    transients: dict[Moment, float]

    @staticmethod
    def of(query: Query, mesh: Mesh, plain: Built, lifetimes: Lifetimes, starts: Sequence[Labels]) -> WithinMemory:
        """The problem with recomputation as far as the query allows it."""
        by_operator = recompute_of(query.program, query.constraints)
        nowhere = query.recompute == "none" and not by_operator
        built = plain if nowhere else expand(plain, lifetimes, query.recompute, by_operator)
        return WithinMemory(query, mesh, plain, built, lifetimes, starts, {})

    def learn(self, built: Built, labels: Labels, measured: Mapping[Moment, float]) -> None:
        """Take what every moment of a lowered plan holds beyond its row as transient."""
        query = self.query
        modelled = modelled_bytes(built, self.mesh, query.state_bytes, self.lifetimes, labels)
        again = bool(self.transients) and built is self.built
        for moment, held in measured.items():
            beyond = held - modelled[moment]
            self.transients[moment] = max(beyond, self.transients[moment]) if again else beyond

    @phase("solve")
    def solve(self) -> Solution:
        """The optimum under the limit, as far as transients are known. Raises InfeasibleError."""
        query = self.query
        rows = memory_rows(
            self.built, self.mesh, query.state_bytes, self.lifetimes, query.budget_bytes, self.transients
        )
        problem = replace(self.built.problem, memory_rows=rows)
        seconds = query.seconds(query.search.memory_seconds)
        solution = solve(
            problem, gap=MEMORY_GAP, time_limit=seconds, warm_start=self._start(problem), stop=query.deadline.stop
        )
        fits = _fits(problem, solution.assignment)
        if fits and solution.statistics.get("forbidden"):
            raise InfeasibleError(
                f"found no plan that obeys the constraints within {format_bytes(query.budget_bytes)} on mesh "
                f'{self.mesh.shape} in {seconds:.3g} s; search longer with mode="max", or loosen the constraints'
            )
        if solution.status is Status.INFEASIBLE or not fits:
            needed, parts = _fullest(self.built, rows, solution.assignment)
            raise DoesNotFit(self.mesh, needed, query.budget_bytes, parts)
        check_certificate(problem, solution)
        return solution

    def _start(self, problem: Problem) -> Labels | None:
        """The cheapest start that fits, with everything or nothing recomputed; else one that fits best."""
        found: list[tuple[float, float, Labels]] = []
        for start in self.starts:
            for preferred in ((SAVED, DROPPED, RECOMPUTED), (RECOMPUTED, SAVED, DROPPED)):
                labels = with_states(self.plain, self.built, start, preferred)
                objective, used = evaluate(problem, labels)
                if not is_forbidden(np.asarray(objective)):
                    over = max(total - row.budget_bytes for total, row in zip(used, problem.memory_rows, strict=True))
                    found.append((max(0.0, over), objective, labels))
        return min(found, key=lambda each: each[:2])[2] if found else None


def _fits(problem: Problem, labels: Labels) -> bool:
    _, used = evaluate(problem, labels)
    return all(total <= row.budget_bytes * (1 + 1e-9) for total, row in zip(used, problem.memory_rows, strict=True))


def _fullest(built: Built, rows: Sequence[MemoryRow], labels: Labels) -> tuple[float, dict[str, float]]:
    """(bytes of the fullest moment under an assignment, transients included; its largest parts)."""
    held = [row.constant_bytes + sum(float(sizes[labels[index]]) for index, sizes in row.bytes.items()) for row in rows]
    fullest = rows[int(np.argmax(held))]
    _, parts = fullest_parts(built, [fullest], labels)
    return max(held), parts
