"""Trials run in child processes: what crashes or hangs is an answer, and the rest goes on."""

from __future__ import annotations

import os
import time

import pytest

from autopar.errors import ConfigurationError
from autopar.rules import child_process
from autopar.rules.child_process import run_in_child


def test_a_trial_that_hangs_is_killed_and_the_next_ones_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "TRIAL_SECONDS", 0.2)

    def trial(index: int) -> int:
        if index == 1:
            time.sleep(600)
        return index

    assert run_in_child(trial, 3) == ([0, None, 2], 1)


def test_trials_that_all_hang_end_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "TRIAL_SECONDS", 0.1)
    monkeypatch.setattr(child_process, "TOTAL_SECONDS", 0.25)
    with pytest.raises(ConfigurationError, match=r"of 1000 trials ended .* crashed or took longer"):
        run_in_child(lambda index: time.sleep(600), 1000)


def test_nothing_that_a_child_says_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    def trial(index: int) -> bool:
        os.write(2, b"free(): invalid size\n")
        return True

    assert run_in_child(trial, 1) == ([True], 0)
    assert capfd.readouterr().err == ""
