"""The tasks of docs/tasks.md, each as its one command, on a small model and a small cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tasks import answered, tasks
from tests.cli.test_commands import autopar
from tests.cli.test_examples import CONFIG

SMALLER = {
    "32x8 H100-SXM": "2x4 H100-SXM",
    "2x8 A100-80 @ 10Gb": "2x2 A100-80 @ 10Gb",
    "256": "8",
    "32": "8",
    "8192": "32",
    "4096": "32",
    "40GB": "100MB",
    "tp=4,dp_shard=-1": "tp=2,dp_shard=-1",
    "model.layers.0.mlp.up_proj.weight=R": "lm_head.weight=R",
}
ELSEWHERE = {"verify"}
"""Starts processes: tests of its own run it."""


def commands() -> list[list[str]]:
    """The words behind `autopar` of every row of the table, for a small model."""
    return [[SMALLER.get(word, word) for word in words] for words in tasks().values()]


def test_the_list_has_every_task() -> None:
    names = [words[0] for words in commands()]
    assert names[0] == "plan"
    assert {"explain", "memory", "what-if", "diff", "edit", "show", "report", "export", "verify"} <= set(names)


def test_a_row_keeps_the_command_as_it_can_be_typed_and_the_first_lines() -> None:
    row = answered("plan it", ["plan", "m:f", "--cluster", "2x8 H100-SXM"], 0, 1.26, "line \n" * 20)
    assert row.command == "autopar plan m:f --cluster '2x8 H100-SXM'"
    assert (row.cpu_seconds, row.lines, len(row.begins), row.begins[0]) == (1.3, 20, 12, "line")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_tasks_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for words in commands():
        if words[0] not in ELSEWHERE:
            done = autopar(*words)
            assert done.returncode == 0, (words, done.stderr)
            assert done.stdout
