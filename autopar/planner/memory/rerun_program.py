"""The fewest seconds of reruns that memory allows, exact for small steps: Checkmate's program (Jain et al., 2020) for
what a plan can say (`reruns.py`), by CP-SAT.

With t an operator of backward, k one of forward, v a value of forward,

    saved[k]                                  k's values wait for backward; else it may run again
    runs[t, k]  <=  1 - saved[k]              k runs again, just before t
    kept[t, v]  <=  kept[t-1, v] + runs[t-1, maker of v]       what t finds; of forward, what is saved
    runs[t, k]  <=  runs[t, maker of v] + kept[t, v]           v that k reads; the same for what t reads
    runs[t, k]  <=  sum of runs[t, reader of what k makes]     nothing runs before it is wanted
    bytes at every operator  <=  its room     of forward, of backward, and of all that runs again

Left out against the paper: operators that run again within forward, and saved values that are given up before
backward has read them last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortools.sat.python import cp_model

from autopar.planner.memory.reruns import Reruns, Step, runs_of
from autopar.planner.problem.prices import Floats

SECONDS_UNITS = 1_000_000
"""Of the seconds of all operators of forward."""
ROUNDING = 1e-3
"""Bytes: parts of one are counted as one."""


def fewest_reruns(
    step: Step, room: Floats, limit: float, hint: Reruns | None = None, seconds: float = math.inf
) -> Reruns | None:
    """Those of the fewest seconds that hold at most `room` bytes at every operator, (operators,); None where none were
    found. limit: of CP-SAT's deterministic time; hint: others to begin with; seconds: limit by the clock."""
    if not seconds:
        return None
    program = _Program(step, room)
    if hint is not None:
        program.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(program.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    stages: dict[int, list[int]] = {}
    for (late, operator), variable in program.runs.items():
        if solver.boolean_value(variable):
            stages.setdefault(operator, []).append(late)
    seconds = sum(step.seconds[operator] * len(lates) for operator, lates in stages.items())
    anew = {k: tuple(sorted(lates)[1:]) for k, lates in sorted(stages.items()) if k in step.repeatable}
    return Reruns(anew, seconds, status == cp_model.OPTIMAL)


class _Program:
    def __init__(self, step: Step, room: Floats) -> None:
        self.step, self.model, self.made = step, cp_model.CpModel(), step.made()
        self.size, self.forward = len(step.reads), step.forward
        whole = [math.ceil(size - ROUNDING) for size in step.value_bytes]
        unit = math.gcd(*whole) or 1
        self.bytes = [size // unit for size in whole]
        self.room = [math.floor(size + ROUNDING) // unit for size in room.tolist()]
        self.readers: list[list[int]] = [[] for _ in step.makers]
        for operator, read in enumerate(step.reads):
            for value in read:
                self.readers[value].append(operator)
        may_rerun = step.repeatable | step.anywhere
        self.wanted = {late: self._wanted(late, may_rerun) for late in range(self.forward, self.size)}
        self.saved = {k: self.model.new_bool_var("") for k in range(self.forward) if k in step.repeatable}
        self.runs = {(late, k): self.model.new_bool_var("") for late, found in self.wanted.items() for k in found}
        self.kept: dict[tuple[int, int], cp_model.IntVar | int] = {}
        self._keep()
        for late in self.wanted:
            self._stage(late)
        self._forward()
        second = sum(step.seconds[: self.forward]) / SECONDS_UNITS or 1.0
        self.model.minimize(sum(round(step.seconds[k] / second) * variable for (_, k), variable in self.runs.items()))

    def _wanted(self, late: int, may_rerun: frozenset[int]) -> list[int]:
        """What may run again for an operator of backward."""
        found, stack = set[int](), [late]
        while stack:
            for value in self.step.reads[stack.pop()]:
                maker = self.step.makers[value]
                if maker in may_rerun and maker not in found:
                    found.add(maker)
                    stack.append(maker)
        return sorted(found)

    def _keep(self) -> None:
        """What every operator of backward finds of forward."""
        step, model = self.step, self.model
        for value, maker in enumerate(step.makers):
            if maker >= self.forward or (maker in step.anywhere and value not in step.returned):
                continue
            uses = {late for late in self.wanted if late in self.readers[value]}
            uses |= {late for late, found in self.wanted.items() if not set(found).isdisjoint(self.readers[value])}
            for late in range(self.forward, max(uses, default=-1) + 1):
                if value in step.returned:
                    self.kept[late, value] = 1
                    continue
                kept = self.kept[late, value] = model.new_bool_var("")
                if late > self.forward:
                    model.add(kept <= self.kept[late - 1, value] + self.runs.get((late - 1, maker), 0))
                elif maker in self.saved:
                    model.add_implication(kept, self.saved[maker])
        for (late, k), runs in self.runs.items():
            if k in self.saved:
                model.add_implication(runs, self.saved[k].negated())
            readers = {reader for value in self.made[k] for reader in self.readers[value]}
            if late not in readers:
                model.add_bool_or([self.runs[late, j] for j in readers if (late, j) in self.runs] + [runs.negated()])

    def _stage(self, late: int) -> None:
        """An operator of backward, and what runs again just before it."""
        model, runs = self.model, self.runs
        kept = {value: self.kept[late, value] for value in range(len(self.bytes)) if (late, value) in self.kept}
        passing = [v for v, maker in enumerate(self.step.makers) if self._is_there(v, maker, late)]
        held = sum(self.bytes[v] for v in passing) + sum(self.bytes[v] * there for v, there in kept.items())
        order = [*self.wanted[late], late]
        for k in order:
            runs_here = runs.get((late, k), 1)
            for value in self.step.reads[k]:
                if (maker := self.step.makers[value]) < self.forward:
                    model.add(runs.get((late, maker), 0) + kept.get(value, 0) >= runs_here)
            held += sum(self.bytes[v] for v in self.made[k]) * runs_here
            model.add(held <= self.room[late])
            if k != late:
                for value in {*self.step.reads[k], *self.made[k]}:
                    if self.step.makers[value] < self.forward and value not in self.step.returned:
                        held -= self.bytes[value] * self._freed(late, k, value, order)

    def _is_there(self, value: int, maker: int, late: int) -> bool:
        """Whether a value lives while an operator of backward runs, whatever is chosen."""
        if value in self.step.returned:
            return maker < late and (late, value) not in self.kept
        return self.forward <= maker < late <= max(self.readers[value], default=-1)

    def _freed(self, late: int, k: int, value: int, order: Sequence[int]) -> cp_model.IntVar:
        """Whether a value is freed behind k, which runs: nothing behind it reads it there, and the next operator of
        backward does not find it."""
        freed = self.model.new_bool_var("")
        self.model.add_implication(freed, self.runs[late, k])
        for reader in self.readers[value]:
            if reader > k and reader in order:
                if reader == late:
                    self.model.add(freed == 0)
                else:
                    self.model.add_implication(freed, self.runs[late, reader].negated())
        after = self.kept.get((late + 1, value))
        if after is not None and not isinstance(after, int):
            self.model.add_implication(freed, after.negated())
        return freed

    def _forward(self) -> None:
        """Bytes of forward: what it passes on to itself, and what is saved behind that."""
        for k in range(self.forward):
            passed, saved = 0, []
            for value, maker in enumerate(self.step.makers):
                last = max((each for each in self.readers[value] if each < self.forward), default=maker)
                if maker <= k and (k <= last or value in self.step.returned):
                    passed += self.bytes[value]
                elif maker <= k:
                    saved.append(self.bytes[value] * self.kept.get((self.forward, value), 0))
            self.model.add(cp_model.LinearExpr.sum(saved) <= self.room[k] - passed)

    def hint(self, reruns: Reruns) -> None:
        """Begin with others."""
        ran = set(runs_of(self.step, reruns))
        for key, variable in self.runs.items():
            self.model.add_hint(variable, key in ran)
        for k, variable in self.saved.items():
            self.model.add_hint(variable, k not in reruns.anew)
