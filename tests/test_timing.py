"""Stations and their times."""

from __future__ import annotations

import time

from autopar.timing import PhaseTimes, phase


@phase("work")
def work() -> None:
    time.sleep(0.01)


def test_equal_phases_add_up() -> None:
    with PhaseTimes() as times:
        work()
        work()
    assert set(times.phases) == {"work"}
    assert 0.02 <= times.phases["work"].seconds < 1.0
    assert times.phases["work"].cpu_seconds < 0.02


def test_nobody_listens_outside() -> None:
    with PhaseTimes() as times:
        pass
    work()
    assert times.phases == {}
