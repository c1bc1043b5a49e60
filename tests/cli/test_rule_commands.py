"""`autopar rules` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.cli import main, rule_commands
from autopar.rules import engine
from tests.distributed.uncovered import UncoveredModel


def uncovered_model() -> tuple[nn.Module, dict[str, Tensor]]:
    model = UncoveredModel()
    return model, {"x": torch.randn(4, next(model.parameters()).shape[-1])}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main([*words])
    return int(stopped.value.code or 0), capsys.readouterr().out


def test_show_prints_the_string(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "rules", "show", "aten::mm") == (0, "m k, k n -> m n ; flops: 2*m*k*n\n")


def test_show_says_what_to_do_without_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "rules", "show", "aten::nonzero")
    assert code == 0
    assert "rules discover aten::nonzero" in out


def test_discover_prints_the_line_to_copy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    code, out = run(capsys, "rules", "discover", "aten::mm", "--example", "randn(6, 12), randn(12, 18)")
    assert code == 0
    assert out.startswith('autopar.register_rule("aten::mm", "a b, b c -> a c')


def test_a_wrong_example_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "rules", "discover", "aten::mm", "--example", "randn(6,", "--json")
    assert code == 2
    assert "write for instance" in json.loads(out)["error"]["message"]


@pytest.mark.parametrize(
    "text",
    ["torch.os.system('touch ran')", "__import__('os')", "randn.__class__", "[x for x in (1,)]", "save(1, 'ran')"],
)
def test_an_example_is_read_and_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out = run(capsys, "rules", "discover", "aten::mm", "--example", text, "--json")
    assert (code, "cannot read the example" in out) == (2, True), out
    assert list(tmp_path.iterdir()) == []


def test_an_example_has_numbers_lists_dtypes_and_tensors() -> None:
    tensor, sizes, flag, negative = rule_commands._example("torch.ones(2, dtype=bfloat16), [1, (2,)], True, -0.5")
    assert (tensor.dtype, tensor.tolist()) == (torch.bfloat16, [1.0, 1.0])
    assert (sizes, flag, negative) == ([1, (2,)], True, -0.5)


def test_coverage_lists_operators_without_a_rule(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("rules", "coverage", "tests.cli.test_rule_commands:uncovered_model", "--cluster", "8 H100-SXM", "--json")
    code, out = run(capsys, *words)
    assert code == 0
    found = json.loads(out)
    assert sorted(gap["operator"] for gap in found["gaps"]) == [
        "autopar_test.cube.default",
        "autopar_test.cube_backward.default",
    ]
    for gap in found["gaps"]:
        assert 0 < gap["bytes_share"] < 1
        assert gap["saved_seconds"] == pytest.approx(gap["replicated_seconds"] * 7 / 8)
    assert found["calls"] > len(found["gaps"])


def test_coverage_of_a_covered_model_has_no_gap(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(
        capsys, "rules", "coverage", "tests.cli.test_rule_commands:covered_model", "--cluster", "8 H100-SXM"
    )
    assert code == 0
    assert "without a rule" not in out


def test_a_plan_that_discovers_is_played_where_nothing_was_discovered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    model, file = "tests.cli.test_rule_commands:uncovered_model", str(tmp_path / "plan.json")
    where = ("--cluster", "2 H100-SXM", "--batch", "4", "--dims", "dp_replicate=2")
    for discover, found in ((False, 0), (True, 2)):
        monkeypatch.setattr(engine, "_DISCOVERED", {})
        engine.rule_of.cache_clear()
        code, out = run(capsys, "plan", model, *where, *["--discover"] * discover, "-o", file, "--json")
        assert code == 0
        plan = json.loads(out)
        assert (len(plan["discovered"]), len(plan["uncovered"])) == (found, 2 - found)
        assert plan["question"]["discover"] is discover
    monkeypatch.setattr(engine, "_DISCOVERED", {})
    engine.rule_of.cache_clear()
    code, out = run(capsys, "simulate", file, "--trust", "--json")
    assert code == 0, out
    assert set(engine._DISCOVERED.values()) == {"a b -> a b", "a b, a b -> a b ; linear: x -"}
    code, out = run(capsys, "explain", file, "/cube#0", "--trust", "--json")
    assert code == 0, out
    engine.rule_of.cache_clear()


def covered_model() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), {"input": torch.randn(2, 4)}
