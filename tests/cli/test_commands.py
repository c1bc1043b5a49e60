"""The command line: one JSON document on stdout, exit codes, readable errors."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import click
import pytest
from torch import nn

from autopar.cli import main
from autopar.cli.commands import exit_code, log_to_stderr
from autopar.cli.options import parse_constraints, parse_dims, parse_mesh
from autopar.errors import AutoparError, ConfigurationError, InfeasibleError, VerificationError
from benchmarks.models import Inputs, gpt2, token_inputs
from tests.plans.test_plan_text import small_plan

ROOT = Path(__file__).resolve().parents[2]
TINY = "tests.cli.test_commands:tiny_model"


def tiny_model(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
    """A factory that the command line can name."""
    return gpt2(layers=2, width=32, heads=4, vocabulary=96, positions=16), token_inputs(96)(batch, seq)


def autopar(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, which has imported what it needs."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as stopped:
        main([*arguments])
    return subprocess.CompletedProcess(arguments, int(stopped.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    return str(path)


def test_dims_mesh_and_constraints_are_read() -> None:
    assert parse_dims("tp=4,dp_shard=-1") == {"tp": 4, "dp_shard": -1}
    assert parse_dims("pp=1+3") == {"pp": [1, 3]}
    assert parse_mesh("2,4") == parse_mesh("2x4") == (2, 4)
    texts = ["no_replicated_compute", "a.*:tp=S(0)", "a.*:dp_shard=R", "head=R", "layers.0:recompute=full"]
    assert parse_constraints(texts) == {
        "no_replicated_compute": True,
        "a.*": {"tp": "S(0)", "dp_shard": "R"},
        "head": {"*": "R"},
        "layers.0": {"recompute": "full"},
    }


@pytest.mark.parametrize(("parse", "text"), [(parse_dims, "tp"), (parse_mesh, "2,x"), (parse_constraints, ["tp"])])
def test_unreadable_options_say_how_to_write_them(parse: object, text: object) -> None:
    assert callable(parse)
    with pytest.raises(click.BadParameter, match="write"):
        parse(text)


def test_exit_codes() -> None:
    assert exit_code(InfeasibleError()) == 3
    assert exit_code(VerificationError()) == 4
    assert exit_code(ConfigurationError()) == exit_code(AutoparError()) == 2


@pytest.mark.slow
def test_the_package_runs_the_command_line(plan_file: str) -> None:
    command = [sys.executable, "-m", "autopar", "show", plan_file, "--json"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["cluster"] == "1x8 H100-SXM"


def test_show_prints_tables_or_one_json_document(plan_file: str) -> None:
    shown = autopar("show", plan_file)
    assert shown.returncode == 0, shown.stderr
    assert "ZeRO-3" in shown.stdout
    assert json.loads(autopar("show", plan_file, "--json").stdout)["cluster"] == "1x8 H100-SXM"


def test_explain_names_the_runner_up(plan_file: str) -> None:
    assert "instead stored R  +31 us" in autopar("explain", plan_file, "head").stdout
    document = json.loads(autopar("explain", plan_file, "head", "--json").stdout)
    assert document["alternatives"]["head"] == [{"instead": "stored R", "delta_seconds": 3.1e-5}]


def test_errors_are_one_message_without_traceback(plan_file: str, tmp_path: Path) -> None:
    missing = autopar("show", str(tmp_path / "none.json"), "--json")
    assert missing.returncode == 2
    assert "Traceback" not in missing.stderr
    assert json.loads(missing.stdout)["error"]["type"] == "ConfigurationError"
    unknown = autopar("explain", plan_file, "heads")
    assert unknown.returncode == 2
    assert "nearest: head" in unknown.stderr
    assert autopar("plan").returncode == 2
    assert autopar("nonsense").returncode == 2


@pytest.mark.slow
def test_plan_writes_a_file_that_holds_its_question(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = (
        "--cluster",
        "8 H100-SXM",
        "--batch",
        "8",
        "--seq",
        "16",
        "--dims",
        "dp_shard=8",
        "-o",
        str(path),
        "--json",
    )
    done = autopar("plan", TINY, *options)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads(path.read_text())
    assert document["question"]["batch"] == 8
    assert document["question"]["precision"] == "fp32"
    assert document["mesh"]["shape"] == [8]


@pytest.mark.slow
def test_what_does_not_fit_exits_with_three() -> None:
    done = autopar("plan", TINY, "--cluster", "8 H100-SXM", "--seq", "16", "--memory-limit", "10KiB")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "InfeasibleError" in done.stderr


@pytest.mark.slow
def test_stages_are_pinned_and_shown() -> None:
    wish = ("--dims", "pp=2", "--schedule", "1f1b", "--micro-batches", "4", "--batch", "8", "--seq", "16")
    done = autopar("plan", TINY, "--cluster", "2 A100-80", *wish, "--json")
    found = json.loads(done.stdout)
    assert (found["pipeline"]["schedule"], found["micro_batches"], len(found["pipeline"]["stages"])) == ("1f1b", 4, 2)
    unknown = autopar("plan", TINY, "--cluster", "2 A100-80", "--dims", "pp=2", "--schedule", "1f2b")
    assert (unknown.returncode, "write one of" in unknown.stderr) == (2, True)


def test_export_writes_what_another_tool_reads(plan_file: str, tmp_path: Path) -> None:
    done = autopar("export", plan_file, "--to", "deepspeed", "-o", str(tmp_path / "ds.json"), "--json")
    document = json.loads(done.stdout)
    assert json.loads((tmp_path / "ds.json").read_text()) == json.loads(document["text"])
    assert document["degrees"]["dp_shard"] * document["degrees"]["tp"] * document["degrees"]["dp_replicate"] == 8
    unpriced = autopar("export", plan_file, "--to", "megatron", "--price")
    assert (unpriced.returncode, "needs the model" in unpriced.stderr) == (2, True)


def test_verify_says_what_was_compared_in_words_or_in_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cli.verify_command.verify_model", lambda *arguments: None)
    assert "any:model: 3 processes" in autopar("verify", "any:model", "--processes", "3").stdout
    document = json.loads(autopar("verify", "any:model", "--processes", "3", "--json").stdout)
    assert document == {"model": "any:model", "processes": 3, "verified": True}


def test_phases_are_lines_on_stderr_unless_the_user_has_handlers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("autopar")
    level = logger.level
    monkeypatch.setattr(logger, "handlers", [])
    logger.setLevel(logging.NOTSET)
    try:
        log_to_stderr()
        logging.getLogger("autopar.any").info("a phase")
        log_to_stderr()
        logging.getLogger("autopar.any").info("another phase")
    finally:
        logger.setLevel(level)
    assert capsys.readouterr().err == "a phase\nanother phase\n"
