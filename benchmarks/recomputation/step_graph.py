"""A step as all methods see it: operators in program order, what each reads, and the bytes of what each makes.

A schedule is the operators in the order in which they run, some of them several times. A reader takes the latest copy
of a value, and a copy lives until its last reader: `peak_bytes` is the same judge for every method.

    schedule 0 1 2 1 3      operator 1 runs twice, its first copy is given up behind 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Schedule: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """seconds: by operator; reads: values by operator; makers, value_bytes: by
    value; forward: how many of the operators are of forward. The last operator reads what the step returns."""

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    reads: tuple[tuple[int, ...], ...]
    makers: tuple[int, ...]
    value_bytes: tuple[int, ...]
    forward: int

    def made(self, operator: int) -> list[int]:
        """The values that an operator makes."""
        return [value for value, maker in enumerate(self.makers) if maker == operator]

    def readers(self, value: int) -> list[int]:
        """The operators that read a value."""
        return [operator for operator, read in enumerate(self.reads) if value in read]

    def extra_seconds(self, schedule: Schedule) -> float:
        """Of what a schedule runs beside every operator once."""
        return sum(self.seconds[operator] for operator in schedule) - sum(self.seconds)

    def peak_bytes(self, schedule: Schedule) -> int:
        """Of all copies that live while any operator runs, its own results included; parameters and batch are not
        among them. Raises ValueError where an operator runs before what it reads."""
        born: dict[int, int] = {}
        change = np.zeros(len(schedule) + 1, dtype=np.int64)
        last: dict[tuple[int, int], int] = {}
        for moment, operator in enumerate(schedule):
            for value in self.reads[operator]:
                if value not in born:
                    raise ValueError(f"{self.names[operator]} runs before {self.names[self.makers[value]]}")
                last[value, born[value]] = moment
            for value in self.made(operator):
                born[value] = moment
                last[value, moment] = moment
        for (value, first), end in last.items():
            change[first] += self.value_bytes[value]
            change[end + 1] -= self.value_bytes[value]
        return int(np.cumsum(change).max())

    @property
    def once(self) -> Schedule:
        """Nothing runs again."""
        return tuple(range(len(self.names)))
