"""What is carried is what runs: a plan trains where neither OR-tools nor transformers can be loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.machine import commit
from benchmarks.gpu.prepare import prepare

SCRIPT = """
import sys
for name in ("ortools", "transformers", "rich", "click", "jinja2"):
    sys.modules[name] = None
from benchmarks.gpu.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_carried_plan_runs_where_nothing_can_be_planned_for_many(tmp_path: Path) -> None:
    lines: list[str] = []
    prepare(tmp_path / "carried", ["1 cpu"], tiny=True, say=lines.append, models=["gpt2"])
    assert len(lines) == 1
    assert (tmp_path / "carried" / "commit").read_text().strip() == (commit(None) or "")
    words = ["--rehearse", "--carry", str(tmp_path / "carried"), "--output", str(tmp_path), "--only", "steps-gpt2"]
    found = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    content = json.loads((tmp_path / "steps-gpt2.json").read_text())
    rows = {row["case"]: row for row in content["rows"]}
    assert list(rows) == ["autopar", "torch.compile", "eager", "compared", "cuda graphs"]
    assert rows["autopar"]["plan"] == "carried"
    assert rows["autopar"]["first_loss"] == pytest.approx(rows["eager"]["first_loss"], rel=1e-2)
    assert rows["autopar"]["peak_bytes"] == pytest.approx(rows["autopar"]["predicted_peak_bytes"], rel=0.02)
    assert {verdict["goal"] for verdict in content["verdicts"]} == {"peak", "step", "torch.compile"}


def test_the_commit_that_was_carried_counts_more_than_what_git_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known, wanted in (("", None), ("def", "def")):
        monkeypatch.setattr("benchmarks.gpu.machine.said", lambda command, known=known: known)
        assert commit(None) == commit(tmp_path) == wanted
    (tmp_path / "commit").write_text("abc\n")
    assert commit(tmp_path) == "abc"
