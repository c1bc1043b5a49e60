"""Is one plan slower than another? Medians and a bootstrap.

slowdown([1.0, 1.1, 1.0], [0.9, 1.1, 1.0])        # Slowdown(ratio=1.0, low=0.9.., high=1.2..): not significant
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLES = 4000
CONFIDENCE = 0.95
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Median of one over median of the other, with the interval of the bootstrap."""

    ratio: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """Whether the one is slower beyond chance."""
        return self.low > 1.0


def slowdown(one: Sequence[float], other: Sequence[float]) -> Slowdown:
    """How many times longer the steps of `one` take than those of `other`: medians of resampled steps, 95 %."""
    random = np.random.default_rng(SEED)
    ratios = _medians(one, random) / _medians(other, random)
    edge = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(ratios, (edge, 1.0 - edge))
    return Slowdown(ratio=float(np.median(one) / np.median(other)), low=float(low), high=float(high))


def _medians(steps: Sequence[float], random: np.random.Generator) -> NDArray[np.float64]:
    drawn = random.choice(np.asarray(steps, dtype=np.float64), (SAMPLES, len(steps)))
    return np.asarray(np.median(drawn, axis=1), dtype=np.float64)
