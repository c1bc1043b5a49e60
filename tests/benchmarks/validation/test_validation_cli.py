"""The command line on files of three rows: what is asked for is added, what is measured is never read."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.validation import __main__ as command
from benchmarks.validation.schemas import schema_named

DEEPGEMM = """# 8 warm-up calls
kind,groups,M,N,K,tflops,mem_GBps
dense_fp8,1,64,2112,7168,206,1688
dense_fp8,1,4096,7168,2048,1127,1047
dense_fp8,1,nonsense,7168,2048,1127,1047
"""
PIPELINE = """model,n_gpus,pp_stages,microbatches,micro_batch_seqs,seq_len,hidden,heads,layers_actual,\
T_F_us,T_B_us,T_W_us,T_comm_us,schedule
1.5B,8,8,24,6,1024,2304,24,22,18522,18086,9337,601,1F1B
1.5B,8,8,24,6,1024,2304,24,22,18522,18086,9337,601,ZB-2p
6.2B,8,8,32,3,1024,4096,32,30,29718,29444,19927,527,1F1B-I
"""


def predict(tmp_path: Path, content: str, kind: str, *options: str) -> list[dict[str, str]]:
    """The rows of OUT.csv."""
    (tmp_path / "in.csv").write_text(content, encoding="utf-8")
    out = tmp_path / "deep" / "out.csv"
    arguments = ["predict", "--kind", kind, "--rows", str(tmp_path / "in.csv"), "--out", str(out), *options]
    result = CliRunner().invoke(command.main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def without_columns(content: str, *dropped: str) -> str:
    lines = [line for line in content.splitlines() if not line.startswith("#")]
    header = lines[0].split(",")
    kept = [index for index, column in enumerate(header) if column not in dropped]
    return "\n".join(",".join(line.split(",")[index] for index in kept) for line in lines) + "\n"


def test_operators_get_a_column_for_every_measured_one_and_a_reason_where_there_is_none(tmp_path: Path) -> None:
    rows = predict(tmp_path, DEEPGEMM, "op")
    assert [row["M"] for row in rows] == ["64", "4096", "nonsense"]
    assert [row["tflops"] for row in rows] == ["206", "1127", "1127"]
    assert float(rows[1]["predicted_tflops"]) > float(rows[0]["predicted_tflops"]) > 0
    assert rows[2]["predicted_tflops"] == rows[2]["predicted_mem_GBps"] == ""
    assert rows[2]["reason"]
    assert rows[0]["reason"] == ""


def test_measurements_are_not_read_and_need_not_be_there(tmp_path: Path) -> None:
    rows = predict(tmp_path, DEEPGEMM, "op")
    blind = predict(tmp_path, without_columns(DEEPGEMM, "tflops", "mem_GBps"), "op")
    forged = predict(tmp_path, DEEPGEMM.replace("1127", "1").replace("206", "9999"), "op")
    told = [row["predicted_tflops"] for row in rows]
    assert told == [row["predicted_tflops"] for row in blind] == [row["predicted_tflops"] for row in forged]
    assert "tflops" not in blind[0]


def test_predictions_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    first = predict(tmp_path, DEEPGEMM, "op")
    again = predict(tmp_path, (tmp_path / "deep" / "out.csv").read_text(), "op")
    assert first == again


def test_pipelines_of_any_schedule_are_predicted(tmp_path: Path) -> None:
    rows = predict(tmp_path, PIPELINE, "pipeline", "--tier", "t0")
    assert float(rows[0]["predicted_bubble_rate_paper_tab5"]) == pytest.approx(0.2431, abs=5e-5)
    assert all(row["predicted_samples_per_gpu_per_s_tab4"] for row in rows)


@pytest.mark.parametrize(
    ("content", "kind", "complaint"),
    [
        (DEEPGEMM, "step", "no measurement of kind 'step'"),
        ("a,b\n1,2\n", "op", "of no known kind of file: a, b"),
    ],
)
def test_bad_input_is_an_error_with_status_2(tmp_path, monkeypatch, capsys, content, kind, complaint) -> None:
    (tmp_path / "in.csv").write_text(content, encoding="utf-8")
    arguments = ["validation", "predict", "--kind", kind, "--rows", str(tmp_path / "in.csv"), "--out", "out.csv"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as exit_status:
        command._main()
    assert exit_status.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_table_and_its_json_name_every_tier_and_the_baseline(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "op_deepgemm_h800_fp8.csv").write_text(DEEPGEMM, encoding="utf-8")
    output = tmp_path / "validation.json"
    arguments = ["--data", str(tmp_path), "--kind", "op", "--output", str(output)]
    result = CliRunner().invoke(command.main, arguments, catch_exceptions=False)
    assert "op_deepgemm_h800_fp8" in result.output
    document = json.loads(output.read_text())
    scores = {score["tier"]: score for score in document["scores"]}
    assert set(scores) == {"t0", "t1", "physics", "naive"}
    assert (scores["t0"]["rows"], scores["t0"]["scored"]) == (3, 2)
    assert str(tmp_path) not in document["command"]
    assert set(document["goals"]) >= {"operator"}


def test_some_kinds_alone_do_not_replace_the_kept_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "any.csv").write_text(DEEPGEMM, encoding="utf-8")
    monkeypatch.setattr(command, "RESULTS", tmp_path / "kept.json")
    arguments = ["--data", str(tmp_path), "--kind", "op", "--json"]
    result = CliRunner().invoke(command.main, arguments, catch_exceptions=False)
    assert json.loads(result.stdout)["scores"]
    assert not (tmp_path / "kept.json").exists()


def test_every_kind_names_its_unit_in_the_schema() -> None:
    assert schema_named("e2e_vtrain_a100_single").measured["step"] == {"iter_time_ms": "ms"}
