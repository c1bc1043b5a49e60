"""The end of a step: what is reduced, by whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.hardware.cluster import Cluster
from benchmarks.validation.links import neighbour_seconds
from benchmarks.validation.runs import ModelShape, ParallelShape, Stack, TrainingRun
from benchmarks.validation.step_end import optimizer_seconds, step_end_seconds

RUN = TrainingRun(
    model=ModelShape(family="gpt", hidden=512, ffn=2048, layers=4, heads=8, kv_heads=8, vocab=2048, seq_len=256),
    parallel=ParallelShape(pp=2),
    stack=Stack(name="megatron"),
    cluster=Cluster.parse("1x8 A100-80"),
)


def test_outer_stages_add_up_the_gradients_of_a_tied_embedding() -> None:
    tied = replace(RUN, model=replace(RUN.model, tied_embeddings=True))
    added = [
        step_end_seconds(tied, chunk, 1e6, 1.0, "t0") - step_end_seconds(RUN, chunk, 1e6, 1.0, "t0")
        for chunk in (("embedding", "layers.0"), ("layers.0",), ("layers.0", "head"))
    ]
    assert added == pytest.approx([neighbour_seconds(RUN, 2048 * 512 * 4, distance=1), 0.0, added[0]])


def test_a_sharded_optimizer_updates_its_part_and_gathers() -> None:
    alone = replace(RUN, parallel=ParallelShape(pp=2))
    assert step_end_seconds(alone, ("layers.0",), 1e9, 1.0, "t0") == pytest.approx(optimizer_seconds(alone, 1e9))
    sharded = replace(RUN, parallel=ParallelShape(pp=2, dp=4, zero_stage=1))
    whole = replace(sharded, parallel=replace(sharded.parallel, zero_stage=0))
    parts = [step_end_seconds(one, ("layers.0",), 1e9, 1.0, "t0") for one in (sharded, whole)]
    assert parts[0] < parts[1]
