"""What a Mamba-2 layer keeps: its own tensors in place of the graph's, cut over tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from benchmarks.validation.memory import ranks
from benchmarks.validation.program_memory import SegmentMemory
from benchmarks.validation.runs import ModelShape, ParallelShape, Stack, StateSpace, TrainingRun
from benchmarks.validation.state_space_memory import with_fused_scan

RUN = TrainingRun(
    model=ModelShape(
        family="hybrid", hidden=64, ffn=256, layers=3, heads=4, kv_heads=4, vocab=512, seq_len=256,
        state_space=StateSpace(heads=4, head_dim=32, state=16, groups=2), pattern="M-*",
    ),
    parallel=ParallelShape(micro_batch=2), stack=Stack(name="megatron"), cluster=Cluster.parse("1x2 H100-SXM"),
)  # fmt: skip
TOKENS, INNER, PRODUCT = 512, 128, 2 * 128 + 2 * 2 * 16 + 4
LAYER = SegmentMemory(
    name="layers.0",
    parameter_elements=1064,
    parameters={"layers.0.norm1.weight": 64, "layers.0.mamba.in_proj.weight": 1000},
    saved_bytes=10**9,
)


def test_a_layer_keeps_what_its_fused_kernel_reads_again() -> None:
    kept = with_fused_scan(LAYER, RUN).saved_bytes
    assert kept == 2 * TOKENS * (2 * 64 + PRODUCT + 3 * INNER)
    dropped = replace(RUN, model=replace(RUN.model, dropout=True))
    assert with_fused_scan(LAYER, dropped).saved_bytes == kept + TOKENS * 64
    attention = replace(LAYER, parameters={"layers.0.attention.qkv.weight": 1064})
    assert with_fused_scan(attention, RUN) is attention


def test_tensor_parallelism_cuts_heads_and_their_weights() -> None:
    halved = replace(RUN, parallel=replace(RUN.parallel, tp=2, sequence_parallel=True))
    whole, half = with_fused_scan(LAYER, RUN), with_fused_scan(LAYER, halved)
    assert 2 * half.saved_bytes == whole.saved_bytes
    assert 2 * half.backward_extra_bytes == whole.backward_extra_bytes
    assert half.parameter_elements == 64 + 500


def test_recomputation_keeps_the_input_alone() -> None:
    full = with_fused_scan(LAYER, replace(RUN, parallel=replace(RUN.parallel, recompute="full")))
    plain = with_fused_scan(LAYER, RUN)
    assert full.saved_bytes == 2 * TOKENS * 64
    assert full.saved_bytes + full.forward_extra_bytes == plain.saved_bytes + plain.forward_extra_bytes


def test_a_hybrid_has_memory_and_its_further_predictions_are_refused() -> None:
    (rank,) = ranks(RUN, "t0")
    (more,) = ranks(replace(RUN, model=replace(RUN.model, pattern="M-*M", layers=4)), "t0")
    assert more.block_saved - rank.block_saved == with_fused_scan(LAYER, RUN).saved_bytes
    with pytest.raises(ConfigurationError, match="further predictions of a hybrid"):
        ranks(replace(RUN, model=replace(RUN.model, extra_predictions=1)), "t0")
