"""Commands about this machine and about plan files: doctor, cache, diff, run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cli import doctor_command
from autopar.cli.doctor_command import check_transformers
from autopar.plans.parallel_plan import PLAN_VARIABLE
from tests.cli.test_commands import autopar as command
from tests.plans.test_plan_text import small_plan


def test_the_doctor_names_what_is_there_and_what_is_not() -> None:
    done = command("doctor", "--json")
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0
    assert found["torch"]["found"].startswith(f"torch {torch.__version__}")
    assert found["gloo"]["status"] == "ok"
    assert (found["GPU"]["status"] == "ok") == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("answer", "status", "found"),
    [
        ("580.1, 700.00, 700.00, 1980, 0x0000000000000001", "ok", "580.1, up to 1980 MHz"),
        ("580.1, 400.00, 700.00, 1980, 0x0000000000000001", "missing", "GPU 0 is limited to 400.00 of 700.00 W"),
        ("580.1, 700.00, 700.00, 1980, 0x0000000000000008", "missing", "the clock of GPU 0 is held down"),
        ("580.1, [N/A], [N/A], [N/A], 0x0000000000000000", "ok", "580.1, up to [N/A] MHz"),
        ("Field is not valid", "missing", "nvidia-smi is not there"),
    ],
)
def test_the_doctor_reads_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, answer: str, status: str, found: str
) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=f"{answer}\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor_command.subprocess, "run", lambda *arguments, **options: done)
    finding = doctor_command.check_driver()
    assert finding.status == status
    assert found in finding.found


def test_the_doctor_names_gpus_that_cannot_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: 2 not in (one, other))
    finding = doctor_command.check_peers()
    assert (finding.status, finding.found) == ("missing", "4 of 6 pairs cannot, as GPU 0 of 2")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert doctor_command.check_peers().status == "ok"


def test_without_a_gpu_nothing_of_it_is_broken() -> None:
    for check in (doctor_command.check_nccl, doctor_command.check_peers, doctor_command.check_driver):
        assert check().status == ("ok" if torch.cuda.is_available() else "missing")


@pytest.mark.parametrize("there", [True, False])
def test_the_doctor_says_where_transformers_are_missing(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there else None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.0")
    found = check_transformers()
    assert (found.status, "autopar[hf]" in found.mend) == (("ok", False) if there else ("missing", True))


def test_a_cache_that_cannot_be_written_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "file" / "cache"))
    done = command("doctor")
    assert done.returncode == 2
    assert "broken: cache" in done.stderr
    assert "set AUTOPAR_CACHE" in " ".join(done.stdout.split())


def test_the_cache_is_listed_and_cleared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "here-4.json").write_text("{}")
    (tmp_path / "other.txt").write_text("kept")
    listed = json.loads(command("cache", "--json").stdout)
    assert listed["files"] == [{"file": "clusters/here-4.json", "bytes": 2}]
    assert "1 files deleted" in command("cache", "--clear").stdout
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["other.txt"]


def test_two_plans_are_compared(tmp_path: Path) -> None:
    plan = small_plan()
    plan.save(tmp_path / "a.json")
    plan.with_(micro_batches=2).save(tmp_path / "b.json")
    same = json.loads(command("diff", str(tmp_path / "a.json"), str(tmp_path / "a.json"), "--json").stdout)
    assert same["equal"]
    text = command("diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")).stdout
    assert re.search(r"^micro-batches: \S+ 1, \S+ 2$", text, re.MULTILINE), text


def test_run_asks_how_many_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = command("run", "--", str(tmp_path / "train.py"))
    assert done.returncode == 2
    assert "--nproc-per-node" in done.stderr


@pytest.mark.slow
def test_run_starts_the_ranks_of_the_plan(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "name = os.environ['RANK'] + 'of' + os.environ['WORLD_SIZE']\n"
        "pathlib.Path(sys.argv[1], name).write_text(os.environ['AUTOPAR_PLAN'])\n"
    )
    plan = small_plan()
    plan.save(tmp_path / "plan.json")
    words = ["run", "--plan", str(tmp_path / "plan.json"), "--", str(script), str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "autopar", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    started = sorted(tmp_path.glob(f"*of{plan.num_ranks}"))
    assert len(started) == plan.num_ranks
    assert {path.read_text() for path in started} == {os.fspath(tmp_path / "plan.json")}


def test_compile_takes_the_plan_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "missing.json"))
    with pytest.raises(autopar.ConfigurationError, match=r"missing\.json"):
        autopar.compile(torch.nn.Linear(2, 2), torch.ones(2, 2), loss_fn=lambda output, _: output.sum())
