"""The measured bubble counts as the simulated one does: what the longest rank's span leaves idle, on average."""

from __future__ import annotations

import pytest

from autopar.cost_models.schedule_player import play_pipeline
from autopar.schedules.list_scheduler import build_schedule
from benchmarks.bubbles import Pass, bubble, stage_costs

FORWARD, BACKWARD = 1.0, 2.0


def _played(family: str, shift: float = 0.0) -> list[list[Pass]]:
    """Passes as a run with these seconds would time them, every rank by a clock of its own."""
    schedule = build_schedule(family, 4, 8)
    stages = stage_costs([[[(action, 0.0, _length(action.kind)) for action in rank] for rank in schedule.ranks]])
    costs = play_pipeline(stages, schedule)
    return [
        [
            (a, start + 100.0 * rank, start + 100.0 * rank + _length(a.kind) - shift)
            for a, start in zip(*of, strict=True)
        ]
        for rank, of in enumerate(zip(schedule.ranks, costs.start_seconds, strict=True))
    ]


def _length(kind: str) -> float:
    return BACKWARD if kind == "B" else FORWARD


@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_a_run_as_simulated_measures_the_simulated_bubble(family: str) -> None:
    schedule = build_schedule(family, 4, 8)
    passes = _played(family)
    simulated = play_pipeline(stage_costs([passes]), schedule).bubble_rate
    assert bubble(passes) == pytest.approx(simulated)
    assert bubble(_played(family, shift=0.1)) > simulated + 0.03  # passes that end early leave ranks idle
