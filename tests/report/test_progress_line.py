"""The line that moves while a command works."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from autopar.report.progress_line import FIRST, ProgressLine, progress_line
from autopar.timing import phase

log = logging.getLogger("autopar.somewhere")


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> ProgressLine:
    logger = logging.getLogger("autopar")
    found = ProgressLine(Console(file=io.StringIO()), 60.0, verbose=False)
    monkeypatch.setattr(logger, "handlers", [found])
    monkeypatch.setattr(logger, "level", logging.INFO)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    return found


def printed(line: ProgressLine) -> str:
    file = line._console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_line_says_the_station_the_latest_message_and_how_long_it_has(line: ProgressLine) -> None:
    assert line.text() == f"0 s of at most 60 s   {FIRST}"
    with phase("solve", logging.INFO):
        log.info("mesh (2, 8): at least 31 ms")
        assert line.text() == "0 s of at most 60 s   solve: mesh (2, 8): at least 31 ms"
    assert line.text().endswith("   mesh (2, 8): at least 31 ms")
    assert printed(line) == ""


def test_warnings_stand_above_the_line(line: ProgressLine) -> None:
    log.warning("operators without a sharding rule: [%s]", "x")
    assert printed(line) == "operators without a sharding rule: [x]\n"
    assert FIRST in line.text()


def test_where_nobody_looks_messages_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger("autopar").handlers[:]
    with progress_line():
        assert logging.getLogger("autopar").handlers == before
    assert capsys.readouterr().err == ""
