"""What `autopar plan` says: three lines, then tables; and which precision it plans in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import autopar
from tests.cli.test_examples import CONFIG

pytestmark = [pytest.mark.usefixtures("shared_captures"), pytest.mark.slow]
ON = ("--cluster", "2 H100-SXM", "--batch", "8", "--seq", "32", "--mode", "fast", "--dims", "dp_shard=2")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "bfloat16"}))
    return "hf:config.json"


@pytest.mark.exhaustive
def test_the_answer_is_three_lines_and_the_configuration_brings_its_precision(config: str) -> None:
    done = autopar("plan", config, *ON, "-o", "plan.json")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].startswith("ZeRO-3 over 2 devices: ")
    assert " tokens/s per GPU, " in lines[0]
    assert lines[0].endswith("GiB")
    assert lines[1].endswith("on this mesh")
    assert lines[2] == "wrote plan.json"
    assert "precision=bf16" in done.stderr
    assert json.loads(Path("plan.json").read_text())["question"]["precision"] == "bf16"
    assert "strategies: " not in done.stdout
    assert "of the FLOPs run in fp32" not in done.stdout
    assert "strategies: " in autopar("show", "plan.json", "-v").stdout


def test_branches_take_the_values_of_a_factory_and_stand_in_the_question(config: str) -> None:
    model = "tests.capture.branching_models:conformer"
    asked = ("--cluster", "2 cpu", "--dims", "dp_shard=2", "--mode", "fast")
    refused = autopar("plan", model, *asked)
    assert refused.returncode == 2
    assert "--branches example" in refused.stderr
    assert "has no values" in autopar("plan", config, *ON, "--branches", "example").stderr
    options = ("--branches", "example", "--reduce-dtype", "bf16", "-o", "plan.json")
    assert "there is none: write dims={'ep': 4}" in autopar("plan", model, *asked, "--ep", "masked").stderr
    assert "write ep='capacity'" in autopar("plan", model, *asked, "--expert-capacity", "1.25").stderr
    done = autopar("plan", model, *asked, *options)
    assert done.returncode == 0, done.stderr
    plan = json.loads(Path("plan.json").read_text())
    assert plan["question"]["branches"] == "example"
    assert plan["question"]["reduce_dtype"] == "bf16"
    again = autopar("explain", "plan.json", "linear.weight", "--trust")  # captured anew, along the same way
    assert again.returncode == 0, again.stderr


@pytest.mark.exhaustive
def test_the_option_holds_before_the_configuration_and_fp32_on_a_gpu_is_said(config: str) -> None:
    done = autopar("plan", config, *ON, "--precision", "fp32", "--json")
    document = json.loads(done.stdout)
    assert document["question"]["precision"] == "fp32"
    assert any("of the FLOPs run in fp32: H100-SXM multiplies bf16" in note for note in document["notes"])
    assert "not written: -o plan.json keeps it" in autopar("plan", config, *ON).stdout.splitlines()
