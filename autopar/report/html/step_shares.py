"""Shares of a played step: computing, communication that nothing hides, and bubbles, of the time of all ranks.

The three add up to 1. Communication is hidden while its rank computes; a bubble is time in which a rank does neither,
as `Simulation.bubble_rate` and `Timeline.exposed_communication_seconds` count it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.cost_models.simulator import COMPUTE_STREAM
from autopar.report.html.timeline import RecordedStep, covered_seconds


@dataclass(frozen=True, slots=True)
class StepShares:
    """Parts of the time of all ranks. exposed_seconds: of the rank that waits most; bubbles: rank -> its part."""

    computing: float
    exposed: float
    exposed_seconds: float
    bubbles: dict[int, float]

    @property
    def bubble(self) -> float:
        """On the average of all ranks."""
        return sum(self.bubbles.values()) / len(self.bubbles)


def step_shares(step: RecordedStep) -> StepShares:
    """Of all spans of a step, which has one rank of every rank group."""
    every: dict[int, list[tuple[float, float]]] = defaultdict(list)
    kernels: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span in step.spans:
        every[span.rank].append((span.start_seconds, span.end_seconds))
        if span.stream == COMPUTE_STREAM:
            kernels[span.rank].append((span.start_seconds, span.end_seconds))
    occupied = {rank: covered_seconds(spans) for rank, spans in sorted(every.items())}
    computing = {rank: covered_seconds(kernels[rank]) for rank in occupied}
    whole = step.seconds * len(occupied) or 1.0
    exposed = {rank: occupied[rank] - computing[rank] for rank in occupied}
    return StepShares(
        computing=sum(computing.values()) / whole,
        exposed=sum(exposed.values()) / whole,
        exposed_seconds=max(exposed.values(), default=0.0),
        bubbles={rank: 1.0 - seconds / step.seconds if step.seconds else 0.0 for rank, seconds in occupied.items()},
    )
