"""The runner of benchmarks.faults on real processes: planted faults get the verdict that they deserve."""

from __future__ import annotations

import pytest

from benchmarks.faults.acting import faults_of
from benchmarks.faults.fault_runner import FaultRow, run_faults
from benchmarks.templates import templates_with
from tests.distributed.pool import IMPORTED

pytestmark = pytest.mark.distributed
PLANTED = "tests.distributed.planted_faults"


@pytest.fixture(scope="module")
def rows() -> dict[str, FaultRow]:
    """By the fault's name."""
    faults = list(faults_of([PLANTED]).values())
    rows = run_faults(faults, [PLANTED], templates_with(IMPORTED))
    return {row.name.split("/")[1]: row for row in rows}


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("sound", "right"),
        ("told", "refused"),
        ("wrong-on-one", "silently wrong"),
        ("waiting", "hangs"),
        ("not-ending", "hangs"),
        ("foreign", "foreign traceback"),
        ("dying", "crashed"),
        ("stopped", "refused"),
        ("losing", "lost"),
        ("left-behind", "silently wrong"),
    ],
)
def test_planted_faults_are_told_apart(rows: dict[str, FaultRow], name: str, verdict: str) -> None:
    assert rows[name].verdict == verdict, rows[name]
    assert rows[name].good == (verdict in ("right", "refused"))


def test_a_row_says_who_and_what(rows: dict[str, FaultRow]) -> None:
    assert "rank 1: Wrong: the loss is 8 % off" in rows["wrong-on-one"].happened
    assert (rows["told"].named, rows["sound"].named, rows["losing"].lost) == (True, None, ("notes",))
    assert rows["waiting"].seconds >= 1.5
    assert rows["told"].as_json()["class"] == "processes that do not know of each other"
