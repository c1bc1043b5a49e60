"""The demo compares one plain process with as many under their plan as there are cores, and says what that shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console

from autopar.demo import journey
from autopar.demo.journey import busy_share, largest_difference, train_both, training_numbers, what_it_shows
from autopar.demo.training import Training


def training(*losses: float, step_seconds: float = 1.0, crowd: float = 1.0) -> Training:
    return Training(losses=losses, step_seconds=step_seconds, crowd=crowd, plan_json=None)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journey, "cores", lambda: 2)


def test_one_process_is_plain_and_has_the_cores_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def train(processes: int, *, threads: int = 1, planned: bool, on_step: Callable[[int], None]) -> Training:
        asked.append((processes, threads, planned))
        on_step(1)
        return training(float(processes))

    monkeypatch.setattr(journey, "train", train)
    one, two = train_both(Console(quiet=True), 2)
    assert asked == [(1, 2, False), (2, 1, True)]
    assert (one.losses, two.losses) == ((1.0,), (2.0,))


def test_losses_part_by_the_largest_of_all_steps() -> None:
    assert largest_difference(training(3.0, 2.0, 1.0), training(3.0, 2.5, 0.75)) == 0.5


def test_runs_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        largest_difference(training(3.0, 2.0), training(3.0, 2.0, 1.0))


def test_the_numbers_are_the_last_losses_and_the_seconds_of_both() -> None:
    found = training_numbers(training(3.0, 2.0, 1.0, step_seconds=0.25), training(3.0, 2.0, 1.5, step_seconds=0.5), 2)
    assert found == {
        "processes": 2,
        "loss_one_process": 1.0,
        "loss_planned": 1.5,
        "largest_difference": 0.5,
        "measured_step_seconds": 0.5,
        "measured_step_seconds_one_process": 0.25,
        "busy_share": 0.0,
    }


def test_the_sentences_say_what_agrees_who_is_faster_and_how_far_the_prediction_is() -> None:
    one, two = training(3.0, 1.0, step_seconds=0.3), training(3.0, 1.0 + 1e-7, step_seconds=0.2)
    agree, pace, predicted, following = what_it_shows(one, two, 0.22, 2)
    assert "of 2 steps, from 3.00 to 1.00, agree within 1e-07" in agree
    assert "2 processes are 1.50 times as fast as one process with 2 threads" in pace
    assert predicted == "The predicted step is 10 % above the measured one."
    assert following.startswith("Next: autopar plan ")
    slower = what_it_shows(two, one, 0.24, 2)
    assert "1.50 times as slow as" in slower[1]
    assert slower[2] == "The predicted step is 20 % below the measured one."


def test_a_busy_machine_is_named() -> None:
    one, two = training(3.0, crowd=1.02), training(3.0, crowd=2.0)
    assert busy_share(one, two, 2) == 0.5
    assert "other processes took 50 % of the CPU" in " ".join(what_it_shows(one, two, 1.0, 2))
    assert "busy" not in " ".join(what_it_shows(one, one, 1.0, 2))


def test_processes_that_share_cores_by_our_own_doing_are_not_called_busy() -> None:
    assert busy_share(training(3.0), training(3.0, crowd=2.0), 4) == 0.0
