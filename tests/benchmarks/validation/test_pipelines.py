"""Predictions of measured pipelines: sizes of a profiled GPT, and, where the measurements are at hand, their errors."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.devices import preset_device
from benchmarks.validation.data import Table, folder, read_table
from benchmarks.validation.gpt_stages import ADAM_FP16_BYTES, ProfiledGpt, gpt_stages, middle_stage
from benchmarks.validation.pipelines import HOST_SECONDS_PER_PASS, fit_host_seconds, predict, throughput
from benchmarks.validation.schemas import schema_named

ROW = {
    "model": "1.5B", "n_gpus": "8", "pp_stages": "8", "microbatches": "24", "micro_batch_seqs": "6", "seq_len": "1024",
    "hidden": "2304", "heads": "24", "layers_actual": "22", "T_F_us": "18522", "T_B_us": "18086", "T_W_us": "9337",
    "T_comm_us": "601", "schedule": "1F1B",
}  # fmt: skip
SCHEMA = schema_named("pipe_zero_bubble_a100")
MODEL = ProfiledGpt(
    layers=22, hidden=2304, heads=24, seq_len=1024, micro_batch=6, vocab=32_000, stages=8,
    forward_seconds=0.018522, backward_seconds=0.018086, weight_seconds=0.009337,
)  # fmt: skip
A100 = preset_device("A100-80")


def values(row: dict[str, str], tier: str = "t0") -> dict[str, float]:
    (predicted,) = predict([row], SCHEMA, tier)  # type: ignore[arg-type]
    assert not predicted.reason
    return {column: float(value) for column, value in predicted.values.items()}


def test_a_row_of_each_schedule_is_predicted() -> None:
    rates = {}
    for name in ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p"):
        predicted = values({**ROW, "schedule": name})
        assert set(predicted) == set(SCHEMA.measured["pipeline"])
        rates[name] = round(predicted["bubble_rate_paper_tab5"], 4)
    assert rates == {
        "1F1B": 0.2431, "1F1B-I": 0.1055, "ZB-H1": 0.1585, "ZB-H2": 0.1083, "ZB-1p": 0.1585, "ZB-2p": 0.0433,
    }  # fmt: skip


def test_the_host_counts_once_per_pass_and_not_in_the_ablation() -> None:
    column = "samples_per_gpu_per_s_tab4"
    assert values(ROW)[column] < values(ROW, "physics")[column]
    assert values(ROW)[column] == throughput(ROW, HOST_SECONDS_PER_PASS) == values(ROW, "t1")[column]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [({"schedule": "Hanayo"}, "HANAYO"), ({"T_F_us": ""}, "T_F_us"), ({"pp_stages": "0"}, "pp_stages is 0")],
)
def test_rows_that_say_too_little_get_a_reason(damage: dict[str, str], reason: str) -> None:
    (predicted,) = predict([{**ROW, **damage}], SCHEMA, "t0")
    assert not predicted.values
    assert reason in predicted.reason


def test_embedding_and_head_take_the_place_of_layers() -> None:
    stages = gpt_stages(MODEL, A100)
    assert stages[1:-1] == [stages[1]] * 6
    assert stages[1].forward_seconds == pytest.approx(MODEL.forward_seconds)
    assert replace(stages[1], once_seconds=0.0) == middle_stage(MODEL)
    assert stages[0].forward_seconds < stages[1].forward_seconds
    layers = sum(stage.state_bytes for stage in stages) / ADAM_FP16_BYTES - (2 * 32_000 + 1024) * 2304
    assert layers == pytest.approx(22 * (12 * 2304**2 + 13 * 2304))


def test_chunks_are_the_same_model_in_smaller_parts() -> None:
    whole, cut = gpt_stages(MODEL, A100), gpt_stages(MODEL, A100, 3)
    assert len(cut) == 24
    for name in ("forward_seconds", "backward_seconds", "weight_seconds", "saved_bytes", "state_bytes", "once_seconds"):
        assert sum(getattr(s, name) for s in cut) == pytest.approx(sum(getattr(s, name) for s in whole))


def test_layers_that_do_not_divide_are_dealt_out_all() -> None:
    stages = gpt_stages(replace(MODEL, layers=21), A100)
    layers = sum(stage.state_bytes for stage in stages) / ADAM_FP16_BYTES - (2 * 32_000 + 1024) * 2304
    assert layers == pytest.approx(21 * (12 * 2304**2 + 13 * 2304))


@pytest.fixture(scope="module")
def table() -> Table:
    try:
        return read_table(folder() / "dev" / "pipe_zero_bubble_a100.csv")
    except ConfigurationError as reason:
        pytest.skip(str(reason))


def test_published_pipelines_are_predicted_within_the_goals(table: Table) -> None:
    """Medians: throughput 2.5 %, memory 2 %, bubble 0.02 points; fitted without a model, throughput within 8 %."""
    predicted = predict([table.schema.inputs_of(row) for row in table.rows], table.schema, "t0")
    errors: dict[str, list[float]] = {}
    for row, prediction in zip(table.rows, predicted, strict=True):
        for column, value in prediction.values.items():
            if row[column]:
                scale = 1.0 if column.startswith("bubble") else float(row[column])
                errors.setdefault(column, []).append(abs(float(value) - float(row[column])) / scale)
    assert statistics.median(errors["bubble_rate_paper_tab5"]) < 0.0002
    assert max(errors["bubble_rate_paper_tab5"]) < 0.00005 + 1e-9
    assert statistics.median(errors["samples_per_gpu_per_s_tab4"]) < 0.025
    assert statistics.median(errors["peak_mem_gb_tab4"]) < 0.02
    for model in {row["model"] for row in table.rows}:
        fitted = fit_host_seconds([row for row in table.rows if row["model"] != model])
        measured = [row for row in table.rows if row["model"] == model and row["samples_per_gpu_per_s_tab4"]]
        left_out = [throughput(row, fitted) / float(row["samples_per_gpu_per_s_tab4"]) - 1.0 for row in measured]
        assert max(map(abs, left_out)) < 0.08


def test_the_constant_is_what_its_fit_gives(table: Table) -> None:
    assert fit_host_seconds(table.rows) == pytest.approx(HOST_SECONDS_PER_PASS)
