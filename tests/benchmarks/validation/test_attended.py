"""Attention of context-parallel ranks and of windows, against what pairs of positions say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.program_costs import ProgramAction
from autopar.hardware.cluster import Cluster
from benchmarks.validation.attended import attended_share, attention_seconds
from benchmarks.validation.links import neighbour_seconds
from benchmarks.validation.runs import ModelShape, ParallelShape, Stack, TrainingRun

RUN = TrainingRun(
    model=ModelShape(family="llama", hidden=512, ffn=2048, layers=4, heads=8, kv_heads=2, vocab=2048, seq_len=4096),
    parallel=ParallelShape(cp=4),
    stack=Stack(name="megatron"),
    cluster=Cluster.parse("1x8 A100-80"),
)


def kernel(seconds: float, kind: str = "attention") -> ProgramAction:
    return ProgramAction(name="core", phase="forward", stream="compute", seconds=seconds, kind=kind)


def test_the_window_counts_pairs_of_every_other_layer() -> None:
    model = replace(RUN.model, window=1000)
    pairs = sum(min(position + 1, 1000) for position in range(4096)) / (4096 * 4097 / 2)
    assert attended_share(model) == pytest.approx((1 + pairs) / 2, rel=1e-3)
    assert attended_share(RUN.model) == attended_share(replace(model, window=4096)) == 1.0


def test_parts_of_the_sequence_travel_beside_compute_or_bound_it() -> None:
    part = 1024 * 2 * 64 * 2 * 2  # positions, heads, width, key and value, bytes
    hop = neighbour_seconds(RUN, part, distance=1)
    assert attention_seconds(RUN, kernel(10 * hop)) == pytest.approx(40 * hop)
    assert attention_seconds(RUN, kernel(0.1 * hop)) == pytest.approx(3.1 * hop)
    both_ways = neighbour_seconds(RUN, 2 * part, distance=1)
    assert attention_seconds(RUN, kernel(0.0, "attention_backward")) == pytest.approx(3 * both_ways)
    assert attention_seconds(replace(RUN, parallel=ParallelShape()), kernel(1.0)) == 1.0
