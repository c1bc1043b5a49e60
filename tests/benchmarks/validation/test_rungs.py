"""Rows of recomputation and offloading, scored apart and against the row without the rung."""

from __future__ import annotations

import pytest

from benchmarks.validation.data import Table
from benchmarks.validation.rungs import compared, rungs_of
from benchmarks.validation.schemas import Predicted, schema_named
from benchmarks.validation.score import _parts

KORTHIKANTI = schema_named("e2e_mem_korthikanti_a100")
FOUNDRY = schema_named("e2e_llmfoundry_fsdp")


def korthikanti(mode: str, value: str, quantity: str = "iteration_time") -> dict[str, str]:
    sizes = {
        "model": "megatron-22B", "hidden": "6144", "ffn": "24576", "seq_len": "2048", "heads": "64", "layers": "48",
        "n_gpus": "8", "tp": "8", "pp": "1", "dp": "1", "global_batch": "4", "micro_batch": "4",
        "interleave_chunks": "1", "unit": "s",
    }  # fmt: skip
    return {**sizes, "quantity": quantity, "recompute_mode": mode, "value": value}


ROWS = (
    korthikanti("full", "1.42"),
    korthikanti("seqpar+selective", "1.1"),
    korthikanti("none", "59.25", "activation_mem"),
)


def test_a_row_stands_over_that_of_its_run_and_quantity_which_recomputes_least() -> None:
    assert rungs_of(KORTHIKANTI, ROWS) == ["recomputed", "recomputed", None]
    assert list(compared(KORTHIKANTI, ROWS)) == [(0, 1)]
    assert list(compared(KORTHIKANTI, (ROWS[0], {**ROWS[1], "hidden": "4096", "ffn": "16384"}))) == []


def test_what_waits_on_the_host_is_a_rung_of_its_own() -> None:
    row = {
        "model": "7b", "gpu": "h100_80gb", "n_gpus": "8", "seq_len": "2048", "micro_batch_seqs": "1",
        "grad_accum": "1", "mp_mode": "PURE", "sharding": "FULL_SHARD", "precision": "amp_bf16",
        "act_ckpt": "True", "act_offload": "True",
    }  # fmt: skip
    untold = {**row, "precision": "fp64"}
    assert rungs_of(FOUNDRY, (row, {**row, "act_offload": "False"}, untold)) == ["offloaded", "recomputed", None]
    assert list(compared(FOUNDRY, (row, {**row, "act_offload": "False"}))) == [(0, 1)]


def test_the_price_of_a_rung_is_scored_as_a_ratio() -> None:
    table = Table(name="f", schema=KORTHIKANTI, columns=tuple(ROWS[0]), rows=ROWS)
    told = [Predicted(values={"value": seconds}) for seconds in (2.84, 1.1)] + [Predicted(reason="of kind memory")]
    parts = {label: (pairs, rows) for label, pairs, rows in _parts(table, "step", told)}
    assert [(pair.predicted, pair.measured) for pair in parts["step, recomputed"][0]] == [(2.84, 1.42), (1.1, 1.1)]
    ((ratio,), _) = parts["step, over that without the rung"]
    assert ratio.predicted / ratio.measured == pytest.approx(2.0)
    assert parts["step, offloaded"] == ([], 0)
