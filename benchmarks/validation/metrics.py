"""Errors of predictions: of times and bytes, of fits-or-not decisions, of rankings, and how sure each is.

    relative_errors([1.1, 2.0], [1.0, 2.5])     # 10 % too much, 20 % too little: 0.1, -0.2
    kendall_tau_b([1, 2, 3], [1, 3, 2])         # 1/3: two pairs in order, one against

An interval is bootstrapped over groups, since rows of one group (one model on one device) err together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> Floats:
    """(predicted - measured) / |measured| of each row: negative where we predict too little."""
    truth = np.asarray(measured, dtype=np.float64)
    return (np.asarray(predicted, dtype=np.float64) - truth) / np.abs(truth)


def largest_under_prediction(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The largest fraction by which a measured value exceeds its prediction; 0 where none does."""
    return max(0.0, -float(relative_errors(predicted, measured).min()))


def balanced_accuracy(predicted: Sequence[bool], measured: Sequence[bool]) -> float:
    """Mean of the shares of true and of false rows that are recognised (of one class where only one is measured)."""
    told, truth = np.asarray(predicted, dtype=bool), np.asarray(measured, dtype=bool)
    return float(np.mean([np.mean(told[truth == value] == value) for value in np.unique(truth)]))


def false_rate(predicted: Sequence[bool], measured: Sequence[bool]) -> float:
    """Share of the rows measured False that are predicted True: of runs that go out of memory, those said to fit."""
    told, truth = np.asarray(predicted, dtype=bool), np.asarray(measured, dtype=bool)
    return float(np.mean(told[~truth])) if not truth.all() else 0.0


def kendall_tau_b(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b: (concordant - discordant) / sqrt((pairs - ties of first)(pairs - ties of second)).

    nan where one side has a single value throughout, since then nothing is ranked.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    upper = np.triu_indices(len(a), k=1)
    order_a = np.sign(a[:, None] - a[None, :])[upper]
    order_b = np.sign(b[:, None] - b[None, :])[upper]
    ranked = float(np.count_nonzero(order_a)) * float(np.count_nonzero(order_b))
    return float(np.sum(order_a * order_b) / np.sqrt(ranked)) if ranked else float("nan")


def first_pick_regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Measured time of the plan predicted fastest, over that of the fastest, less 1 (first of equal predictions)."""
    return float(measured[int(np.argmin(predicted))] / np.min(measured) - 1.0)


def best_among_first(predicted: Sequence[float], measured: Sequence[float], count: int = 3) -> bool:
    """Whether the fastest plan is among the `count` plans predicted fastest."""
    return int(np.argmin(measured)) in np.argsort(predicted, kind="stable")[:count]


@dataclass(frozen=True, slots=True)
class Interval:
    """A bootstrap interval of a statistic."""

    low: float
    high: float


def bootstrap(
    values: Sequence[float],
    groups: Sequence[object],
    statistic: Callable[[Floats], float] = lambda drawn: float(np.median(drawn)),
    draws: int = 300,
    seed: int = 0,
) -> Interval:
    """95 % interval of a statistic of `values`: groups are drawn with replacement, and each brings all its rows."""
    rows: dict[object, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        rows.setdefault(group, []).append(value)
    members = [np.asarray(part) for part in rows.values()]
    random = np.random.default_rng(seed)
    drawn = [
        statistic(np.concatenate([members[index] for index in random.integers(len(members), size=len(members))]))
        for _ in range(draws)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(float(low), float(high))
