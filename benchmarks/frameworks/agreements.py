"""Agreements: two runs of a row -> the verdict over it.

works as it is          the same losses, weights and metrics, with no line beside that of the framework's recipe
works with a change     the same, with a further line
refused                 an error of autopar in which the row's words stand
differs                 other numbers, or ranks that do not agree
fails                   an error that the row does not expect, or no error where it expects one
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch

from benchmarks.frameworks.framework_row import FrameworkRow, Run

Word = Literal["works as it is", "works with a change", "refused", "differs", "fails"]
GOOD: frozenset[Word] = frozenset({"works as it is", "works with a change", "refused"})
TOLERANCE = 1e-5
MEAN_LOSS = 0.01
LOOSE = ("bf16", "fp16")
"""Whose single steps round differently: their mean loss counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict over a row. loss_error and weight_error: the largest relative ones, of bf16 that of the mean loss."""

    word: Word
    says: str
    loss_error: float | None = None
    weight_error: float | None = None
    steps: int = 0

    @property
    def good(self) -> bool:
        """Whether the feature works or is refused by name."""
        return self.word in GOOD


def judged(row: FrameworkRow, alone: Run | str, together: Sequence[Run] | str) -> Finding:
    """alone: the run on one process, or its error; together: of every rank, or their error."""
    if isinstance(together, str):
        if row.refused and re.search(row.refused, together) and "autopar.errors." in together:
            return Finding(word="refused", says=_last_line(together))
        return Finding(word="fails", says=_last_line(together))
    if row.refused:
        return Finding(word="fails", says=f"not refused with {row.refused}")
    if isinstance(alone, str):
        return Finding(word="fails", says=f"without autopar, on one process: {_last_line(alone)}")
    return _compared(row, alone, together)


def _compared(row: FrameworkRow, alone: Run, together: Sequence[Run]) -> Finding:
    ours = together[0]
    loose = row.precision in LOOSE
    losses = mean_error(alone.losses, ours.losses) if loose else largest_error(alone.losses, ours.losses)
    weights = weight_error(alone.weights, ours.weights)
    metrics = largest_error(list(alone.metrics.values()), list(ours.metrics.values()))
    limit = MEAN_LOSS if loose else TOLERANCE
    found: dict[str, Any] = {"loss_error": losses, "weight_error": weights, "steps": len(ours.losses)}
    if any(other.losses != ours.losses for other in together):
        return Finding(word="differs", says="ranks have different losses", **found)
    if losses > limit or metrics > limit or (weights > limit and not loose):
        says = f"loss {losses:.1e}, weights {weights:.1e}, metrics {metrics:.1e} off, {limit:g} is allowed"
        return Finding(word="differs", says=says, **found)
    return Finding(word="works with a change" if row.change else "works as it is", says=row.change, **found)


def largest_error(expected: Sequence[float], found: Sequence[float]) -> float:
    """Of all pairs, relative to the expected number; infinite where they are not as many, or not numbers."""
    if len(expected) != len(found):
        return float("inf")
    errors = [abs(a - b) / max(abs(a), 1e-6) for a, b in zip(expected, found, strict=True)]
    return max((error if error == error else float("inf") for error in errors), default=0.0)


def mean_error(expected: Sequence[float], found: Sequence[float]) -> float:
    """Of the mean; infinite where they are not as many."""
    if len(expected) != len(found):
        return float("inf")
    return largest_error([fmean(expected)], [fmean(found)]) if expected else 0.0


def weight_error(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """The largest relative norm of a difference; infinite where names or shapes differ. A norm counts as 1e-5 at least:
    the bias of a key, whose gradient is nothing but rounding, is 1e-11 after 50 steps of fp32."""
    if {n: t.shape for n, t in expected.items()} != {n: t.shape for n, t in found.items()}:
        return float("inf")
    errors = [float((a.double() - found[n].double()).norm() / a.double().norm().clamp(min=1e-5))
              for n, a in expected.items()]  # fmt: skip
    return max((error if error == error else float("inf") for error in errors), default=0.0)


def _last_line(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if re.match(r"^[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (lines or error.strip().splitlines()[-1:] or [""])[0][:500]
