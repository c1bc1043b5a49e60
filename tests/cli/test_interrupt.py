"""Ctrl-C while a plan is searched for: a process of its own, and a real signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_commands import ROOT, TINY

COMMAND = ("plan", TINY, "--cluster", "2x8 H100-SXM", "--batch", "16", "--seq", "16", "--mode", "max", "--json")


def interrupted(behind: str, *more: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `autopar plan`, which gets SIGINT when a line of stderr begins with `behind`.

    A process hands on which signals it ignores, and what a shell starts in the background ignores this one."""
    child = subprocess.Popen(
        [sys.executable, "-m", "autopar", *COMMAND, *more], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert child.stderr is not None
    lines = []
    for line in child.stderr:
        lines.append(line)
        if line.startswith(behind):
            child.send_signal(signal.SIGINT)
            break
    out, rest = child.communicate(timeout=300)
    return child.returncode, out, "".join(lines) + rest


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ctrl_c_keeps_the_best_plan_so_far(tmp_path: Path) -> None:
    code, out, err = interrupted("mesh (", "-o", str(tmp_path / "plan.json"))
    assert (code, "Traceback" in err) == (0, False), err
    plan = json.loads(out)
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    assert any("Ctrl-C" in note for note in plan["notes"]), plan["notes"]
    assert plan["bound_seconds"] <= plan["objective_seconds"]


@pytest.mark.slow
def test_ctrl_c_before_there_is_a_plan_says_so(tmp_path: Path) -> None:
    code, out, err = interrupted("model=", "-o", str(tmp_path / "plan.json"))
    assert (code, "Traceback" in err) == (130, False), err
    assert "there was no plan yet" in err
    assert json.loads(out)["error"]["type"] == "Interrupted"
    assert not (tmp_path / "plan.json").exists()
