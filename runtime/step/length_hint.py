"""Length hint: says once what padding saves, where graphs of new lengths take longer to make than the loop to run.

    hint.made(program, seconds)      # behind every graph that a call made; warns where there is something to say

It counts what it knows: the lengths so far, the seconds that their graphs took, the seconds of everything else since
the first of them. The multiple that it names is the largest whose padding adds little to these lengths.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.program import Program
from autopar.runtime.process_groups import rank

log = logging.getLogger(__name__)

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HintLimits:
    """When there is something to say, and what is said."""

    new_lengths: int = 10
    """Values of one dim that calls have met beside the first one."""
    share_of_time: float = 0.5
    """Of the time since the first graph of a new length, that making graphs takes at least."""
    padding: float = 0.2
    """Elements that padding may add, as a share of what there is, over all lengths seen."""
    multiples: tuple[int, ...] = (512, 256, 128, 64, 32, 16, 8, 4)


HINT_LIMITS = HintLimits()


class LengthHint:
    """See the module docstring."""

    def __init__(self, limits: HintLimits = HINT_LIMITS, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limits, self._clock = limits, clock
        self._graphs: list[tuple[Shapes, float]] = []
        self._began = 0.0
        self._was_said = False

    def made(self, program: Program, seconds: float) -> None:
        """A graph of a program was made, just now, in so many seconds."""
        if not self._graphs:
            self._began = self._clock() - seconds
        self._graphs.append(({value.name: value.shape for value in program.inputs if value.role == "input"}, seconds))
        text = "" if self._was_said else self._text()
        if text:
            self._was_said = True
            if rank() == 0:
                log.warning(text)

    def _text(self) -> str:
        """What to say now, "" where there is nothing."""
        name, dim, lengths = varying_dim([shapes for shapes, _ in self._graphs])
        spent, elapsed = sum(seconds for _, seconds in self._graphs), self._clock() - self._began
        if len(lengths) < self._limits.new_lengths or spent < self._limits.share_of_time * elapsed:
            return ""
        head = (
            f"{len(lengths)} values of dim {dim} of {name} ({lengths[0]} to {lengths[-1]}), each a graph of its own, "
            f"cost {spent:.1f} of the last {elapsed:.1f} s"
        )
        multiple = multiple_for(lengths, self._limits)
        if multiple is None:
            return f"{head}; take fewer of them"
        padded = sorted({-(-length // multiple) * multiple for length in lengths})
        added = sum(-length % multiple for length in lengths) / sum(lengths)
        before = "0, 0, " * (len(self._graphs[-1][0][name]) - 1 - dim)
        return (
            f"{head}. Padded to {', '.join(map(str, padded))} they would have cost about "
            f"{len(padded) * spent / len(self._graphs):.1f} s, with {added:.0%} more elements: x = "
            f"torch.nn.functional.pad(x, ({before}0, -x.shape[{dim}] % {multiple})), value=-100 for labels, and a mask "
            "where the model takes one"
        )


def varying_dim(seen: Sequence[Shapes]) -> tuple[str, int, list[int]]:
    """(input, dim, its values in rising order) of the dim with the most different values; of equal ones the first."""
    values: dict[tuple[str, int], set[int]] = {}
    for shapes in seen:
        for name, shape in shapes.items():
            for dim, size in enumerate(shape):
                values.setdefault((name, dim), set()).add(size)
    name, dim = max(values, key=lambda key: len(values[key]), default=("", 0))
    return name, dim, sorted(values.get((name, dim), ()))


def multiple_for(lengths: Sequence[int], limits: HintLimits) -> int | None:
    """The largest multiple to which padding adds no more than the limit, if it makes fewer lengths of these."""
    for multiple in limits.multiples:
        added = sum(-length % multiple for length in lengths)
        fewer = len({math.ceil(length / multiple) for length in lengths}) < len(lengths)
        if fewer and added <= limits.padding * sum(lengths):
            return multiple
    return None
