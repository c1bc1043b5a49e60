"""Memory of published runs: Korthikanti's figures, what ranks hold, and which operators run again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from benchmarks.validation.memory import RankMemory, peak_bytes, ranks
from benchmarks.validation.recomputation import computed_again
from benchmarks.validation.runs import ModelShape, ParallelShape, Stack, TrainingRun

GIB = 2**30
GPT_22B = TrainingRun(
    model=ModelShape(
        family="gpt", hidden=6144, ffn=24576, layers=48, heads=64, kv_heads=64, vocab=51200, seq_len=2048,
        tied_embeddings=True, dropout=True,
    ),
    parallel=ParallelShape(tp=8, micro_batch=4),
    stack=Stack(name="megatron", attention="unfused"),
    cluster=Cluster.parse("1x8 A100-80"),
)  # fmt: skip


def with_parallel(run: TrainingRun, **changes: object) -> TrainingRun:
    return replace(run, parallel=replace(run.parallel, **changes))


def fullest(run: TrainingRun) -> RankMemory:
    return max(ranks(run, "t0"), key=lambda rank: rank.peak)


@pytest.mark.parametrize(
    ("changes", "gib"),
    [
        ({}, 59.25),
        ({"sequence_parallel": True, "recompute": "selective"}, 9.5625),
        ({"recompute": "full"}, 59.25 * 0.0764),
    ],
)
def test_activations_of_22b_are_those_of_the_paper(changes: dict[str, object], gib: float) -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), figures 1 and 7."""
    assert fullest(with_parallel(GPT_22B, **changes)).block_saved / GIB == pytest.approx(gib, rel=0.01)


def test_states_of_22b_are_those_of_the_paper() -> None:
    assert fullest(GPT_22B).block_states / GIB == pytest.approx(45.5625, rel=0.002)


def test_the_first_stage_keeps_most_micro_batches_and_the_last_the_logits() -> None:
    first, *_, last = ranks(with_parallel(GPT_22B, pp=4, micro_batches=8), "t0")
    assert first.block_saved == pytest.approx(4 * last.block_saved, rel=0.01)
    assert last.saved > last.block_saved


def test_data_and_context_parallelism_cut_states_and_sequences() -> None:
    plain, cut = fullest(GPT_22B), fullest(with_parallel(GPT_22B, dp=2, zero_stage=1))
    assert cut.states == pytest.approx(plain.states * (6 + 12 / 2) / 18)
    flash = replace(GPT_22B, stack=Stack(name="megatron"))
    halved = fullest(with_parallel(flash, cp=2))
    assert halved.block_saved == pytest.approx(fullest(flash).block_saved / 2, rel=0.001)


def test_without_fitted_constants_only_states_and_workspaces_stay_between_steps() -> None:
    rank = ranks(GPT_22B, "physics")[0]
    assert rank.between_steps == rank.states + rank.workspaces
    assert peak_bytes(GPT_22B, "t0") > peak_bytes(GPT_22B, "physics")


@pytest.mark.parametrize(
    ("modules", "again"),
    [
        (("core_attn",), {"layers.0.attention.core/softmax#0"}),
        (("mlp",), {"layers.0.mlp.up/mm#0", "layers.0.mlp.down/mm#0", "layers.0.mlp/gelu#0"}),
        (("pointwise", "second_matmul"), {"layers.0.mlp.down/mm#0", "layers.0.mlp/gelu#0"}),
    ],
)
def test_modules_name_the_operators_that_run_again(modules: tuple[str, ...], again: set[str]) -> None:
    names = [
        "layers.0.attention.core/softmax#0", "layers.0.mlp.up/mm#0", "layers.0.mlp/gelu#0", "layers.0.mlp.down/mm#0",
        "layers.0.mlp/gelu#0/bwd", "head/sum#0",
    ]  # fmt: skip
    assert computed_again(names, ParallelShape(recompute="selective", recompute_modules=modules)) == again
    assert computed_again(names, ParallelShape(recompute="full")) == set(names[:4])
    assert not computed_again(names, ParallelShape())
