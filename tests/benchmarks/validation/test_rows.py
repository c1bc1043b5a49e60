import os

import pytest

from benchmarks.validation.counts import model_flops, parameters
from benchmarks.validation.data import VARIABLE, dev_tables, folder
from benchmarks.validation.fields import Unpredictable, cluster_of, integer, number
from benchmarks.validation.rows import training_run
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import schema_named
from benchmarks.validation.shapes import gpt_of_size, model_named, padded_vocab


def run_of(name: str, **fields: object) -> TrainingRun:
    schema = schema_named(name)
    return training_run(schema, schema.inputs_of({column: str(value) for column, value in fields.items()}))


VTRAIN = {
    "n_gpus": 4, "global_batch_seqs": 32, "micro_batch_seqs": 2, "hidden": 2048, "heads": 16, "layers": 24,
    "seq_len": 1024, "tp": 2, "dp": 2, "pp": 1,
}  # fmt: skip


def test_a_vtrain_row_is_a_gpt_with_full_recomputation_on_dgx_a100() -> None:
    run = run_of("e2e_vtrain_a100_single", **VTRAIN)
    assert (run.parallel.micro_batches, run.parallel.global_batch, run.parallel.recompute) == (8, 32, "full")
    assert (run.model.ffn, run.model.vocab) == (8192, 50432)  # 50257 up to a multiple of 128 x 2
    assert run.stack.dtype == "float16"
    assert (run.cluster.num_nodes, run.cluster.devices_per_node, run.cluster.device.name) == (1, 4, "A100-80")


def test_a_batch_that_replicas_do_not_divide_is_a_reason() -> None:
    with pytest.raises(Unpredictable, match="global batch: 33 does not divide by 4"):
        run_of("e2e_vtrain_a100_single", **{**VTRAIN, "global_batch_seqs": 33})
    with pytest.raises(Unpredictable, match="8 GPUs, but the parallel degrees make 4"):
        run_of("e2e_vtrain_a100_single", **{**VTRAIN, "n_gpus": 8})


def test_a_bridge_row_takes_the_first_value_of_two() -> None:
    run = run_of(
        "e2e_megatron_bridge", task="Pre-Training Performance", model="LLAMA3_70B", system="DGX-GB200", n_gpus=64,
        precision="", gbs=128, mbs=2, seq_len=8192, fsdp="64 (0)", tp="1 (2)", pp="1 (4)", cp=1, vp="1 (5)", ep=1,
    )  # fmt: skip
    assert (run.parallel.zero_stage, run.parallel.dp, run.parallel.micro_batches) == (3, 64, 1)
    assert (run.cluster.num_nodes, run.cluster.devices_per_node) == (1, 64)
    assert run.stack.dtype == "float8"


def test_a_bridge_row_of_experts_and_adapters() -> None:
    fields = {
        "task": "LoRA Performance", "model": "DeepSeekV3 (w/o MTP)", "system": "DGX-GB300", "n_gpus": 256,
        "precision": "MXFP8", "gbs": 4096, "mbs": 1, "seq_len": 4096, "tp": 1, "pp": 2, "cp": 1, "vp": 8, "ep": 32,
    }  # fmt: skip
    run = run_of("e2e_megatron_bridge", **fields)
    assert (run.cluster.num_nodes, run.cluster.devices_per_node) == (4, 64)  # 64 of each rack's 72
    assert (run.model.extra_predictions, run.stack.scaling, run.adapter_rank) == (0, "block32", 16)
    assert run.parallel.schedule == "interleaved"
    assert run_of("e2e_megatron_bridge", **{**fields, "model": "DeepSeekV3"}).model.extra_predictions == 1
    with pytest.raises(Unpredictable, match="'Llama 9' are not in the table"):
        run_of("e2e_megatron_bridge", **{**fields, "model": "Llama 9"})


GOLDEN = {
    "gpu": "A100 (draco oci)", "case": "gpt3_mcore_te_tp1_pp4_vp1", "family": "gpt", "num_layers": 12,
    "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "micro_batch_size": 4, "global_batch_size": 32,
    "tp": 1, "pp": 4, "vpp_layers_per_stage": 1, "dtype": "bf16", "nodes": 1, "gpus_per_node": 8,
    "transformer_impl": "transformer_engine", "vocab_file_or_tok": "GPT2BPE(default)",
}  # fmt: skip


def test_a_golden_row_with_megatron_defaults() -> None:
    run = run_of("e2e_mem_megatron_golden", **GOLDEN)
    assert (run.parallel.dp, run.parallel.micro_batches, run.parallel.virtual_stages) == (2, 4, 3)
    assert (run.model.ffn, run.model.vocab, run.model.dropout, run.model.tied_embeddings) == (2048, 50304, True, True)
    assert (run.stack.attention, run.parallel.zero_stage) == ("flash", 0)
    local = run_of("e2e_mem_megatron_golden", **{**GOLDEN, "transformer_impl": "local"})
    assert local.stack.attention == "unfused"


def test_a_golden_row_that_names_fewer_gpus_than_its_degrees_need_gets_as_many() -> None:
    fields = {**GOLDEN, "tp": 2, "pp": 8, "ep": 8, "num_experts": 8, "num_layers": 56, "vpp_layers_per_stage": ""}
    assert run_of("e2e_mem_megatron_golden", **fields).cluster.num_devices == 128


def test_simumax_runs_slices_of_a_model_with_sequence_parallelism() -> None:
    run = run_of(
        "e2e_mem_simumax_b200", case="llama3_70b_tp2_l12_mbc8_cef", model="llama3_70b", layers=12, gpu="B200-SXM",
        n_gpus=8, tp=2, pp=1, dp=4, cp=1, ep=1, seq_len=4096, micro_batch_seqs=1, microbatches=8,
    )  # fmt: skip
    assert (run.model.layers, run.model.kv_heads, run.parallel.sequence_parallel, run.stack.fused_loss) == (
        12, 8, True, True,
    )  # fmt: skip


def test_torchtitan_runs_on_its_own_h100_and_pipelines_single_sequences() -> None:
    fields = {
        "model": "Llama3.1-405B", "n_gpus": 512, "technique": "FSDP+TP+PP+AsyncTP", "seq_len": 8192,
        "local_batch_seqs": 32, "global_batch_seqs": 256, "act_ckpt": "full", "fsdp": 8, "tp": 8, "pp": 8, "cp": 1,
        "schedule": "Interleaved 1F1B", "torch_compile": 1, "precision": "float8",
        "hw": "H100 96GB HBM2e 2.4TB/s, 500W limit, 8/node NVLink",
    }  # fmt: skip
    run = run_of("e2e_mem_torchtitan", **fields)
    assert (run.cluster.device.name, run.parallel.micro_batch, run.parallel.micro_batches) == ("H100-96", 1, 32)
    assert (run.parallel.schedule, run.stack.overlap_tensor, run.stack.gather_bytes) == ("interleaved", True, 1)
    assert run_of("e2e_mem_torchtitan", **{**fields, "hw": "H200 141GB, 8/node"}).cluster.device.name == "H200-SXM"


def test_out_of_memory_studies_are_read_from_text() -> None:
    run = run_of(
        "oom_bmtrain_v100", hw="4 nodes x 8 V100 (size not stated)", strategy="ZeRO2 mp4", batch_size_per_gpu=8,
        model="GPT-2 13B: 40 layers, 128 heads, 5120 hidden, seq 512",
    )  # fmt: skip
    assert (run.parallel.tp, run.parallel.dp, run.parallel.zero_stage, run.parallel.micro_batch) == (4, 8, 2, 32)
    study = run_of(
        "oom_megatron_bridge", hw="H100-80", n_gpus=32, varied="mlp+core_attn",
        config="Llama3-70B SFT fp8-cs seq4096 mbs1 gbs32 tp4 pp4 vpp5 dp2",
    )  # fmt: skip
    assert study.parallel.recompute_modules == ("mlp", "core_attn")
    assert (study.parallel.virtual_stages, study.stack.dtype) == (5, "float8")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("LLAMA3_70B", 70.6), ("Llama3.1-405B", 405.9), ("mpt-7b", 6.66), ("Qwen3_235B_A22B", 235.1),
        ("Mixtral 8x7B", 46.7), ("deepseekv2", 235.7), ("GPT-OSS 120B", 116.8), ("kimi_k2", 1026.4),
    ],
)  # fmt: skip
def test_sizes_of_published_models_give_their_parameter_counts(name: str, billions: float) -> None:
    assert parameters(model_named(name, 2048)).total == pytest.approx(billions * 1e9, rel=2e-3)


def test_a_gpt_is_found_by_its_parameter_count() -> None:
    shape = gpt_of_size(6658859008, seq_len=2048, vocab=50368)  # MPT-7B as llm-foundry counts it, to the last one
    assert (shape.hidden, shape.layers) == (4096, 32)


def test_model_flops_are_six_times_parameters_and_tokens() -> None:
    run = run_of("e2e_vtrain_a100_single", **VTRAIN)
    tokens = 32 * 1024
    dense = 6 * (24 * 12 * 2048**2 + 50432 * 2048) * tokens
    attention = 3 * 32 * 24 * 4 * 2048 * 1024**2
    assert model_flops(run) == pytest.approx(dense + attention)


def test_numbers_are_read_as_files_write_them() -> None:
    row = {"a": "64 (0)", "b": "n/a", "c": "3986 (3546)", "d": "many"}
    assert (integer(row, "a"), integer(row, "b", 1), number(row, "c")) == (64, 1, 3986.0)
    with pytest.raises(Unpredictable, match="d is 'many'"):
        integer(row, "d", 1)
    assert padded_vocab(50257, 8) == 51200
    assert cluster_of("DGX H100", 32).num_nodes == 4


@pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"the measurements are elsewhere: set {VARIABLE}")
def test_nearly_every_published_run_is_read_and_fills_its_cluster() -> None:
    read = refused = 0
    for table in dev_tables(folder()):
        if not table.name.startswith(("e2e", "mem", "oom")):
            continue
        for row in table.rows:
            try:
                run = training_run(table.schema, table.schema.inputs_of(row))
            except Unpredictable:
                refused += 1
                continue
            degrees = run.parallel
            assert degrees.tp * degrees.pp * degrees.dp * degrees.cp == run.cluster.num_devices, row
            read += 1
    assert refused / (read + refused) < 0.03
