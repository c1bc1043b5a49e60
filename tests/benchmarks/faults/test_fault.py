"""Faults as data: names, layouts, and what must stay as it was."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from benchmarks.faults.__main__ import MODULES, chosen
from benchmarks.faults.acting import faults_of
from benchmarks.faults.fault import Scene, digest_of, fault, faults_in, protected_paths


@fault(3, "rank 1 does it", on=("dp2", "tp4"), words="rank 1")
def made_up(scene: Scene) -> None:
    """Two faults."""


def test_one_function_is_a_fault_on_every_layout() -> None:
    first, second = faults_in({"made_up": made_up, "other": 3})
    assert (first.name, first.processes, second.processes) == ("test_fault/made-up/dp2", 2, 4)
    assert (first.kind, first.expected) == ("test_fault", "refused, naming rank 1")
    assert second.scene(3, Path()).dims == {"tp": 4}


def test_there_are_faults_of_every_point_on_one_two_and_four_processes() -> None:
    faults = list(faults_of(MODULES).values())
    assert {each.point for each in faults} == set(range(1, 18))
    counts = Counter(each.processes for each in faults)
    assert counts[2] + counts[4] >= 120
    assert min(counts[size] for size in (1, 2, 4)) >= 40
    assert {each.processes for each in chosen(faults, "^batches/", 4)} == {4}


def test_what_is_protected_is_noticed_when_it_changes(tmp_path: Path) -> None:
    scene = made_up[0].scene(0, tmp_path)
    kept, folder = tmp_path / "kept.txt", tmp_path / "folder"
    kept.write_text("a")
    folder.mkdir()
    scene.protect(kept, folder, tmp_path / "never-there")
    before = protected_paths(tmp_path)
    assert all(digest_of(path) == digest for path, digest in before.items())
    kept.unlink()
    os.mkfifo(kept)
    (folder / "half-written").touch()
    (tmp_path / "never-there").touch()
    assert all(digest_of(path) != digest for path, digest in before.items())
