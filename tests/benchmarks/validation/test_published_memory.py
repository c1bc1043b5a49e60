"""Memory of published runs: Korthikanti's figures, what ranks hold, and which operators run again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster
from benchmarks.validation.bert_memory import untold_bytes
from benchmarks.validation.memory import RankMemory, peak_bytes, ranks
from benchmarks.validation.recomputation import computed_again
from benchmarks.validation.runs import Experts, ModelShape, ParallelShape, Stack, TrainingRun
from benchmarks.validation.stack_memory import dispatched_bytes, library_bytes

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


MIB = 2**20
EIGHT_EXPERTS = TrainingRun(
    model=ModelShape(
        family="gpt", hidden=512, ffn=2048, layers=2, heads=8, kv_heads=8, vocab=1024, seq_len=1024, biases=False,
        experts=Experts(count=8, per_token=2, hidden=1024),
    ),
    parallel=ParallelShape(tp=4, ep=2, expert_tp=2, sequence_parallel=True, micro_batch=4),
    stack=Stack(name="megatron"),
    cluster=Cluster.parse("1x8 H100-SXM"),
)  # fmt: skip


def test_a_layer_of_experts_saves_what_its_dispatcher_writes() -> None:
    """2 x 1,024 local tokens on the 2 ranks of an expert are 4,096 rows: 512 wide into the first product, 512 (half an
    expert) wide out of it, out of the activation, and weighed. The graph counts 8,192 rows of 256, 256 and 512."""
    assert EIGHT_EXPERTS.model.experts is not None
    megatron, graph = 4096 * (512 + 3 * 512), 8192 * (256 + 256 + 512)
    assert dispatched_bytes(EIGHT_EXPERTS, EIGHT_EXPERTS.model.experts, 1.0) == 2 * (megatron - graph)
    assert dispatched_bytes(EIGHT_EXPERTS, EIGHT_EXPERTS.model.experts, 1.5) == 2 * (1.5 * megatron - graph)


def test_grouped_products_of_experts_have_four_workspaces_more() -> None:
    alone = replace(EIGHT_EXPERTS, stack=Stack(name="megatron", grouped_experts=False))
    assert library_bytes(EIGHT_EXPERTS) - library_bytes(alone) == 4 * 32 * MIB


def test_tokens_of_expert_parallelism_are_gathered_into_a_buffer_that_stays() -> None:
    gathers = replace(EIGHT_EXPERTS, stack=Stack(name="megatron", gathered_experts=True))
    more = fullest(gathers).between_steps - fullest(EIGHT_EXPERTS).between_steps
    assert more == 1024 * 4 * 512 * 2  # 1,024 local tokens of 4 ranks, 16 bits


def test_deferred_gradients_of_the_head_wait_on_the_last_stage() -> None:
    plain = with_parallel(GPT_22B, pp=2, micro_batches=4)
    waiting = replace(plain, stack=replace(plain.stack, deferred_head_gradients=2))
    more = [after.peak - before.peak for before, after in zip(ranks(plain, "t0"), ranks(waiting, "t0"), strict=True)]
    head = 51200 // 8 * 6144
    assert more == [0, 2 * (2 * 4 * 2048 * (51200 / 8 + 6144) + head)]


def test_only_the_share_of_the_fullest_rank_of_experts_is_fitted() -> None:
    assert fullest(EIGHT_EXPERTS).peak > max(rank.peak for rank in ranks(EIGHT_EXPERTS, "physics"))
    assert peak_bytes(GPT_22B, "t0") == peak_bytes(GPT_22B, "physics")


@pytest.mark.parametrize(
    ("gpu", "stack", "mib"),
    [
        ("A100-80", {}, 2 * 8.125 + 4),
        ("H100-SXM", {}, 2 * 32 + 32),
        ("B200-SXM", {}, 2 * 8.125 + 32),
        ("B200-SXM", {"fixed_workspaces": True}, 2 * 32 + 32),
        ("H100-SXM", {"own_layers": True}, 2 * 32),
    ],
)
def test_workspaces_are_those_of_the_library_and_the_device(gpu: str, stack: dict[str, bool], mib: float) -> None:
    run = replace(GPT_22B, cluster=Cluster.parse(f"1x8 {gpu}"), stack=Stack(name="megatron", **stack))
    assert library_bytes(run) == mib * MIB


def test_scores_of_megatrons_own_attention_stand_in_a_buffer() -> None:
    own = replace(GPT_22B, stack=replace(GPT_22B.stack, own_layers=True))
    assert fullest(own).workspaces - library_bytes(own) == 2 * 4 * (64 // 8) * 2048**2


def test_gradients_of_16_bits_are_widened_for_the_optimizers_step() -> None:
    half = replace(GPT_22B, stack=replace(GPT_22B.stack, gradient_bytes=2))
    rank = fullest(half)
    parameters = rank.states / 16
    assert rank.widened == 4 * parameters
    assert fullest(GPT_22B).widened == 0
    assert rank.between_steps == rank.states + rank.workspaces + rank.leftovers + rank.widened
    assert rank.peak == max(rank.between_steps, rank.between_steps - rank.widened + rank.activations)


def test_a_further_prediction_is_a_layer_and_a_pass_through_the_head() -> None:
    plain = with_parallel(GPT_22B, pp=2, micro_batches=2)
    more = replace(plain, model=replace(plain.model, extra_predictions=1))
    (_, last), (first, further) = ranks(plain, "t0"), ranks(more, "t0")
    layer = last.block_states / 24
    own = 18 * (2 * 6144**2 // 8 + 3 * 6144 + 51200 * 6144 // 8)
    assert further.states - last.states == pytest.approx(layer + own)
    logits = 4 * 4 * 2048 * 51200 / 8
    assert further.saved - last.saved > logits + last.block_saved / 24
    assert first.states == ranks(plain, "t0")[0].states


def test_offloaded_activations_leave_what_the_running_layer_needs() -> None:
    here = fullest(replace(GPT_22B, stack=Stack(name="megatron")))
    away = fullest(replace(GPT_22B, stack=Stack(name="megatron", offload_activations=True)))
    assert away.block_saved < 0.25 * here.block_saved  # what a dense product down reads stays
    assert away.activations > here.block_saved / 48


def test_chunks_of_a_pipeline_may_have_layers_of_their_own_number() -> None:
    even = with_parallel(GPT_22B, pp=4, micro_batches=8)
    uneven = with_parallel(even, layers_per_chunk=(8, 16, 16, 8))
    states = [rank.block_states for rank in ranks(uneven, "t0")]
    assert states == pytest.approx([states[0], 2 * states[0], 2 * states[0], states[0]])
    with pytest.raises(ConfigurationError, match="are no 4 chunks of 48 layers"):
        ranks(with_parallel(even, layers_per_chunk=(12, 12, 24)), "t0")


def test_recomputed_mlps_are_dense_ones() -> None:
    names = ["layers.0.mlp.up/mm#0", "layers.1.mlp.router/mm#0", "layers.1.mlp.shared.up/mm#0", "layers.1.mlp/silu#0"]
    again = computed_again(names, ParallelShape(recompute="selective", recompute_modules=("mlp",)))
    assert again == {"layers.0.mlp.up/mm#0"}


def test_an_encoder_decoder_has_both_sides_and_one_table_of_words() -> None:
    hidden, ffn, vocab, seq = 256, 1024, 1024, 64
    run = TrainingRun(
        model=ModelShape(
            family="t5", hidden=hidden, ffn=ffn, layers=3, heads=4, kv_heads=4, vocab=vocab, seq_len=seq,
            decoder_seq_len=32, tied_embeddings=True, dropout=True,
        ),
        parallel=ParallelShape(), stack=Stack(name="megatron", attention="unfused"),
        cluster=Cluster.parse("1x8 A100-80"),
    )  # fmt: skip
    attention = 4 * hidden * (hidden + 1)
    mlp = 2 * hidden * ffn + hidden + ffn
    encoder, decoder = attention + mlp + 4 * hidden, 2 * attention + mlp + 6 * hidden
    parameters = 3 * (encoder + decoder) + (vocab + seq) * hidden + 2 * 2 * hidden
    assert fullest(run).states == 18 * parameters
    with pytest.raises(ConfigurationError, match="encoder and decoder"):
        ranks(with_parallel(run, pp=2), "t0")


def test_an_offloaded_layer_beside_exchanges_runs_with_two_neighbours() -> None:
    plain = fullest(replace(GPT_22B, stack=Stack(name="megatron")))
    away = replace(GPT_22B, stack=Stack(name="megatron", offload_activations=True))
    beside = replace(away, stack=replace(away.stack, overlap_exchanges=True))
    moved = (plain.block_saved - fullest(away).block_saved) / 48
    assert fullest(beside).activations - fullest(away).activations == pytest.approx(moved, rel=0.1)
    unclaimed = fullest(away).between_steps - plain.between_steps
    assert unclaimed == 48 * 2 * 4 * 2048 * 6144  # one activation a layer of the one micro-batch


def test_a_router_in_float32_keeps_a_copy_of_its_input() -> None:
    assert EIGHT_EXPERTS.model.experts is not None
    wide = replace(EIGHT_EXPERTS.model, experts=replace(EIGHT_EXPERTS.model.experts, wide_router=True))
    more = fullest(replace(EIGHT_EXPERTS, model=wide)).saved - fullest(EIGHT_EXPERTS).saved
    assert more == 2 * 4 * 4 * 1024 * 512 // 4  # 2 layers, float32, sequences cut over 4 ranks


def test_dtensor_keeps_the_gathered_input_of_the_head() -> None:
    cut = with_parallel(GPT_22B, sequence_parallel=True)
    fsdp = replace(cut, stack=Stack(name="fsdp2", kernels="eager"))
    other = replace(fsdp, stack=replace(fsdp.stack, name="fsdp3"))
    gathered = 2 * 4 * 2048 * 6144
    assert fullest(fsdp).saved - fullest(other).saved == gathered


def test_bert_keeps_a_mask_a_layer_and_an_allowance_under_tensor_parallelism() -> None:
    bert = replace(
        GPT_22B,
        model=replace(GPT_22B.model, family="bert", layers=4, seq_len=256, hidden=512, ffn=1024, heads=8, kv_heads=8),
        parallel=ParallelShape(tp=2, micro_batch=4),
    )
    masked = replace(bert, stack=replace(bert.stack, layer_masks=True))
    assert fullest(masked).activations - fullest(bert).activations == 4 * 4 * 256 * 256
    assert untold_bytes(bert) == 7 * 2 * 4 * 256 * 512
    assert untold_bytes(with_parallel(bert, tp=1)) == untold_bytes(GPT_22B) == 0
