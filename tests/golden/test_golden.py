"""What is planned and lowered today is what the golden files say, line by line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import fx

from autopar.passes.emitter import Emitter
from tests.golden.cases import CASES
from tests.golden.stored import FILES, SAME_TORCH, TORCH, UPDATE, difference, stored, write
from tests.golden.texts import texts

same_torch = pytest.mark.skipif(not SAME_TORCH, reason=f"the files show what torch {TORCH} captures")


@pytest.mark.exhaustive(
    sample=["stack-uneven", "stack-chunks", "gpt", "pictures", "tied-dropout", "stages-interleaved"]
)
@same_torch
@pytest.mark.parametrize("name", CASES)
def test_plan_and_programs_are_those_of_the_files(name: str) -> None:
    changed = difference(name, texts(CASES[name]))
    if changed:
        pytest.fail(f"{changed}\n\nif this is meant: {UPDATE} {name}", pytrace=False)


def test_every_folder_belongs_to_a_case() -> None:
    assert {path.name for path in FILES.iterdir() if path.is_dir()} == set(CASES)


@same_torch
def test_a_sum_that_becomes_a_maximum_shows_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = Emitter.collective

    def maxima(self: Emitter, *args: object, **kwargs: object) -> fx.Node:
        node = sums(self, *args, **kwargs)  # type: ignore[arg-type]
        for start in node.all_input_nodes:
            start.args = tuple("max" if arg == "sum" else arg for arg in start.args)
        return node

    monkeypatch.setattr(Emitter, "collective", maxima)
    lines = difference("stack-uneven", texts(CASES["stack-uneven"])).splitlines()
    assert any(line.startswith("-") and "all_reduce" in line and "'sum', 'tp'" in line for line in lines)
    assert any(line.startswith("+") and "all_reduce" in line and "'max', 'tp'" in line for line in lines)


@pytest.mark.exhaustive
@same_torch
@pytest.mark.slow
def test_files_do_not_depend_on_hashes_or_threads() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-m", "tests.golden", "stages-1f1b", "tied-dropout"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "nothing differs", done.stdout + done.stderr


def test_a_difference_is_a_unified_diff_and_writing_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.golden.stored.FILES", tmp_path)
    write("case", {"plan.txt": "one\ntwo\n", "rank_0.txt": "left out later\n"})
    made = {"plan.txt": "one\n2\n"}
    assert difference("case", made).splitlines()[:6] == [
        "--- stored/case/plan.txt",
        "+++ made/case/plan.txt",
        "@@ -1,2 +1,2 @@",
        " one",
        "-two",
        "+2",
    ]
    write("case", made)
    assert stored("case") == made
    assert difference("case", made) == ""
