"""Flags that belong to tensor parallelism are written with tensor parallelism, and with nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.exporters.uniform import UniformPlan
from autopar.exporters.written_configurations import configuration
from tests.plans.test_plan_text import small_plan

PLAN = small_plan()
TENSOR = UniformPlan(dp_shard=4, tp=2, zero_stage=3, sequence_parallel=True)


@pytest.mark.parametrize(("tp", "split", "written"), [(2, True, True), (2, False, False), (1, True, False)])
def test_megatron_splits_sequences_only_with_tensor_parallelism_that_does(tp: int, split: bool, written: bool) -> None:
    uniform = replace(TENSOR, tp=tp, sequence_parallel=split)
    words = configuration(PLAN, uniform, "megatron").text.split()
    assert ("--sequence-parallel" in words) == written


@pytest.mark.parametrize(
    ("tp", "stage", "written"), [(2, 3, 2), (2, 2, 2), (1, 3, 3)], ids=["lowered", "as it is", "without tp"]
)
def test_deepspeed_says_that_zero_3_is_lost_where_tensor_parallelism_takes_it(
    tp: int, stage: int, written: int
) -> None:
    found = configuration(PLAN, replace(TENSOR, tp=tp, zero_stage=stage), "deepspeed")
    assert json.loads(found.text)["zero_optimization"]["stage"] == written
    assert any("AutoTP" in sentence for sentence in found.lost) == (written != stage)


def test_deepspeed_has_a_table_of_tensor_parallelism_only_where_there_is_some() -> None:
    assert json.loads(configuration(PLAN, TENSOR, "deepspeed").text)["tensor_parallel"] == {"autotp_size": 2}
    assert "tensor_parallel" not in json.loads(configuration(PLAN, replace(TENSOR, tp=1), "deepspeed").text)
