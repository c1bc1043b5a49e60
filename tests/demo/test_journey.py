"""The demo compares one plain process with four under their plan, and says their last losses and how far they part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console

from autopar.demo import journey
from autopar.demo.journey import PROCESSES, largest_difference, training_numbers
from autopar.demo.training import Training


def training(*losses: float, step_seconds: float = 1.0) -> Training:
    return Training(losses=losses, step_seconds=step_seconds, plan_json=None)


def test_one_process_is_plain_and_the_others_have_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def train(processes: int, *, planned: bool, on_step: Callable[[int], None]) -> Training:
        asked.append((processes, planned))
        on_step(1)
        return training(float(processes))

    monkeypatch.setattr(journey, "train", train)
    one, four = journey._train_both(Console(quiet=True))
    assert asked == [(1, False), (PROCESSES, True)]
    assert (one.losses, four.losses) == ((1.0,), (float(PROCESSES),))


def test_losses_part_by_the_largest_of_all_steps() -> None:
    assert largest_difference(training(3.0, 2.0, 1.0), training(3.0, 2.5, 0.75)) == 0.5


def test_runs_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        largest_difference(training(3.0, 2.0), training(3.0, 2.0, 1.0))


def test_the_numbers_are_the_last_losses_and_the_seconds_of_both() -> None:
    found = training_numbers(training(3.0, 2.0, 1.0, step_seconds=0.25), training(3.0, 2.0, 1.5, step_seconds=0.5))
    assert found == {
        "loss_one_process": 1.0,
        "loss_planned": 1.5,
        "largest_difference": 0.5,
        "measured_step_seconds": 0.5,
        "measured_step_seconds_one_process": 0.25,
    }
