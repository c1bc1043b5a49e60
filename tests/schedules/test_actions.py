"""What an action of a schedule waits for: every micro-batch of this step, the first one too."""

from __future__ import annotations

from autopar.schedules.actions import PipeAction, parse_schedule


def test_the_first_micro_batch_waits_for_the_other_stages_as_every_other_does() -> None:
    schedule = parse_schedule("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    for micro_batch in (0, 1):
        assert schedule.awaited(PipeAction(1, "F", micro_batch)) == (0, "F")
        assert schedule.awaited(PipeAction(0, "B", micro_batch)) == (1, "gradient")


def test_a_left_over_pass_waits_for_passes_of_this_step_only() -> None:
    left_by_both = parse_schedule("0B-1,0F0\n1B-1,1F0,1B0")
    assert left_by_both.awaited(PipeAction(0, "B", -1)) == (1, "gradient")
    left_by_the_first = parse_schedule("0B-1,0F0\n1F0,1B0")
    assert left_by_the_first.awaited(PipeAction(0, "B", -1)) is None
