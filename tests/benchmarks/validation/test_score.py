import numpy as np
import pytest

from benchmarks.validation.data import Table
from benchmarks.validation.naive import naive, naive_bytes, naive_seconds
from benchmarks.validation.oom import capacity_bytes, fits
from benchmarks.validation.report import as_table
from benchmarks.validation.rows import training_run
from benchmarks.validation.schemas import Predicted, schema_named
from benchmarks.validation.score import Pair, _parts, score_pairs, score_ranking


def pairs_of(*values: tuple[float, float]) -> list[Pair]:
    return [Pair(told, true, (str(index),)) for index, (told, true) in enumerate(values)]


def test_the_headline_is_the_median_and_rows_without_prediction_are_counted() -> None:
    (score,) = score_pairs("step time", "f", "t0", pairs_of((1.1, 1.0), (1.3, 1.0), (0.5, 1.0)), rows=5)
    assert (score.rows, score.scored) == (5, 3)
    assert score.error == pytest.approx(0.3)
    assert score.low <= score.error <= score.high
    (empty,) = score_pairs("step time", "f", "t0", [], rows=2)
    assert np.isnan(empty.error)


def test_memory_tells_the_largest_under_prediction() -> None:
    (score,) = score_pairs("memory", "f", "t0", pairs_of((0.9, 1.0), (2.0, 1.0)), rows=2)
    assert score.details["largest_under_prediction"] == pytest.approx(0.1)


def test_out_of_memory_is_scored_by_balanced_accuracy_and_false_fits() -> None:
    told_fits = pairs_of((1, 1), (1, 1), (1, 1), (1, 0))
    (score,) = score_pairs("OOM", "f", "t0", told_fits, rows=4)
    assert (score.error, score.details["false_fits"]) == (0.5, 1.0)
    (right,) = score_pairs("OOM", "f", "t0", pairs_of((1, 1), (0, 0)), rows=2)
    assert (right.error, right.details["false_fits"]) == (1.0, 0.0)


def test_a_ranking_is_the_mean_over_groups_and_a_constant_prediction_ranks_nothing() -> None:
    groups = {("a",): [(1.0, 10.0), (2.0, 11.0), (3.0, 12.0)], ("b",): [(5.0, 12.0), (5.0, 10.0)]}
    (score,) = score_ranking("f", "t0", 5, groups)
    assert score.error == pytest.approx(0.5)
    assert score.details["regret"] == pytest.approx(0.1)
    assert score.details["groups"] == 2


def test_collectives_are_binned_by_their_bytes() -> None:
    schema = schema_named("coll_nccl_tests")
    rows = [{"msg_bytes": text, "time_us": "10"} for text in ("1024", "1048576", "large", "33554432", "0")]
    table = Table(name="f", schema=schema, columns=("msg_bytes", "time_us"), rows=tuple(rows))
    told = [Predicted(values={"time_us": 11.0})] * len(rows)
    bins = {label: len(pairs) for label, pairs, _ in _parts(table, "collective", told)}
    assert bins == {"collective small": 2, "collective mid": 1, "collective large": 2}


def test_a_cell_of_the_table_holds_the_headline_and_its_interval() -> None:
    scores = score_pairs("step time", "file", "t0", pairs_of((1.1, 1.0)), rows=1)
    assert "10.0 % [10.0, 10.0] p90 10.0" in as_table(scores)


VTRAIN = {
    "n_gpus": "4", "global_batch_seqs": "32", "micro_batch_seqs": "2", "hidden": "2048", "heads": "16",
    "layers": "24", "seq_len": "1024", "tp": "2", "dp": "1", "pp": "2",
}  # fmt: skip


def test_the_naive_step_is_eight_times_parameters_and_tokens_with_a_bubble() -> None:
    run = training_run(schema_named("e2e_vtrain_a100_single"), VTRAIN)
    tokens, dense = 32 * 1024, 24 * 12 * 2048**2 + 50432 * 2048
    attention = 32 * 24 * 4 * 2048 * 1024**2
    flops = 8 * dense * tokens + 4 * attention
    peak = run.cluster.device.flops_per_second["float16"]
    ring = 2 * 3 * 12 * (2 * 2 * 1024 * 2048 * 16) / run.cluster.intra_link.bytes_per_second  # 2 (tp - 1) / tp is 1
    assert naive_seconds(run) == pytest.approx((flops / (4 * peak) + ring) * (1 + 1 / 16))


def test_the_naive_memory_is_sixteen_bytes_a_parameter_and_the_inputs_of_recomputed_layers() -> None:
    run = training_run(schema_named("e2e_vtrain_a100_single"), VTRAIN)
    states = 16 * (24 * 12 * 2048**2 + (50432 + 1024) * 2048) / 4
    assert naive_bytes(run) == pytest.approx(states + 2 * (2 * 2 * 1024 * 2048) * 12)


def test_the_naive_bubble_is_that_of_the_formula() -> None:
    schema = schema_named("pipe_zero_bubble_a100")
    row = dict.fromkeys(schema.inputs, "8") | {"microbatches": "24", "schedule": "1F1B"}
    (predicted,) = naive([row], schema, "pipeline")
    assert predicted.values["bubble_rate_paper_tab5"] == pytest.approx(7 / 31)


def test_a_run_fits_up_to_what_the_driver_reports_less_the_context() -> None:
    run = training_run(schema_named("e2e_vtrain_a100_single"), VTRAIN)
    assert capacity_bytes(run.cluster.device) == pytest.approx(84.94e9, rel=1e-3)
    assert fits(run, 84.1e9)  # 84.94 GB less 0.79 of the context
    assert not fits(run, 84.2e9)
