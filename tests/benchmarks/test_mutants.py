"""Survivors are found again where their lines are now, and equivalent ones are counted apart."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("coverage", reason="coverage is not installed")

from benchmarks.mutants import __main__ as main
from benchmarks.mutants.__main__ import GONE, Chooser, Mutant, Place, summarised, try_survivors
from benchmarks.mutants.operators import mutations_of


def row(mutant: str, outcome: str) -> dict[str, Any]:
    return {"mutant": mutant, "room": "a", "outcome": outcome, "tests": 2}


ROWS = [
    row("a.py:1:4 x = 1  -->  x = 2", "failed"),
    row("a.py:2:10 y = 1  -->  y = 2", "passed"),
    row("a.py:3:16 z = 1  -->  z = 2", "unreached"),
    row("a.py:4:20 w = 1  -->  w = 2", "passed"),
]
EQUIVALENT = {"a.py: w = 1  -->  w = 2": "nothing reads it"}


def test_the_share_is_of_those_that_could_be_noticed() -> None:
    found = summarised([*ROWS, row("a.py:9:90 v = 1  -->  v = 2", GONE)], EQUIVALENT)
    assert (found["mutants"], found["killed"], found["equivalent"]) == (5, 1, 1)
    assert found["killed_share"] == pytest.approx(1 / 3)
    assert found["survivors"] == [
        "a.py:2:10 y = 1  -->  y = 2 (passed, 2 tests)", "a.py:3:16 z = 1  -->  z = 2 (unreached, 2 tests)",
    ]  # fmt: skip
    assert found["rooms"] == {"a": "3 of 5"}


def test_survivors_meet_the_tests_that_changed_where_their_lines_are_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = mutations_of("a.py", "x = 1\n\n\ny = 1\n")
    met: list[tuple[str, tuple[str, ...]]] = []

    def changed(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[-4:] == ["old", "new", "--", "tests"]
        return subprocess.CompletedProcess(command, 0, stdout="tests/test_b.py\ntests/b.py\ntests/test_a.py\n")

    def tried(place: Place, imported: object, mutants: Sequence[Mutant], chosen: Chooser, *, bound: float) -> None:
        for _, mutation in mutants:
            met.append((mutation.name, chosen(mutation).tests))
            found = {**row(mutation.name, "failed" if bound else "passed"), "bound": bound}
            with place.rows.open("a") as file:
                file.write(json.dumps(found) + "\n")

    monkeypatch.setattr(main, "rooms", lambda tree: {"a": now})
    monkeypatch.setattr(main.subprocess, "run", changed)
    monkeypatch.setattr(main, "try_all", tried)
    for _ in ("as it runs", "as it goes on when all is done"):
        rows = try_survivors(Place(tmp_path), {"commit": "old", "rows": ROWS}, EQUIVALENT, "new")
    name = "a.py:4:12 y = 1  -->  y = 2"
    assert met == [(name, ("tests/test_a.py",)), (name, ("tests/test_b.py", "tests/test_a.py"))]
    assert [(found["outcome"], found.get("commit")) for found in rows] == [
        ("failed", None), ("failed", "new"), (GONE, "new"), ("passed", None),
    ]  # fmt: skip
    assert rows[1]["tests"] == 4
