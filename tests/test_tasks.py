"""The tasks of docs/tasks.md, each as its one command, on a small model and a small cluster."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.test_cli import autopar
from tests.test_cli_examples import CONFIG

TASKS = Path(__file__).resolve().parent.parent / "docs" / "tasks.md"
SMALLER = {
    "32x8 H100-SXM": "2x4 H100-SXM",
    "256": "8",
    "8192": "32",
    "40GB": "100MB",
    "tp=4,dp_shard=-1": "tp=2,dp_shard=-1",
}
ELSEWHERE = {"verify"}
"""Starts processes: tests of its own run it."""


def commands() -> list[list[str]]:
    """The words behind `autopar` of every row of the table."""
    found = re.findall(r"^\| .* \| `autopar (.*)` \|$", TASKS.read_text(), flags=re.MULTILINE)
    return [[SMALLER.get(word, word) for word in shlex.split(line)] for line in found]


def test_the_list_has_every_task() -> None:
    names = [words[0] for words in commands()]
    assert names[0] == "plan"
    assert {"explain", "memory", "what-if", "edit", "show", "report", "export", "verify"} <= set(names)


@pytest.mark.slow
def test_the_tasks_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for words in commands():
        if words[0] not in ELSEWHERE:
            done = autopar(*words)
            assert done.returncode == 0, (words, done.stderr)
            assert done.stdout
