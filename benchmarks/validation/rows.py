"""A row of any file of training runs as a `TrainingRun`: one reader per kind of file.

    training_run(schema_named("e2e_vtrain_a100_single"), row).parallel.micro_batches      # 4

A reader sees the inputs of its row only and raises Unpredictable where they say too little; it fills in what the
file's source says of all its runs (dtype, recomputation, cluster), never what would fit the measurement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.errors import AutoparError
from benchmarks.validation import stacks
from benchmarks.validation.fields import (
    Row,
    Unpredictable,
    cluster_of,
    cluster_of_gpu,
    flag,
    integer,
    text,
    whole,
)
from benchmarks.validation.rows_megatron import golden, korthikanti, simumax
from benchmarks.validation.rows_oom import bmtrain, bridge_memory
from benchmarks.validation.rows_recipes import bridge, colossal, galvatron, torchtitan
from benchmarks.validation.runs import ModelShape, ParallelShape, TrainingRun
from benchmarks.validation.schemas import Schema
from benchmarks.validation.shapes import GPT2_VOCAB, gpt_of_size, model_named, padded_vocab

MPT_VOCAB = 50368


def training_run(schema: Schema, row: Row) -> TrainingRun:
    """The run that a row describes. Raises Unpredictable with the reason where it cannot be told."""
    return _cached_run(schema.name, tuple(sorted(row.items())))


@functools.lru_cache(maxsize=4096)
def _cached_run(name: str, fields: tuple[tuple[str, str], ...]) -> TrainingRun:
    reader = _READERS.get(name)
    if reader is None:
        raise Unpredictable(f"rows of {name} describe no training run")
    try:
        return reader(dict(fields))
    except AutoparError as error:
        raise Unpredictable(str(error)) from error


def program_key(schema: Schema, row: Row) -> str:
    """Equal for rows whose runs execute the same program; rows that follow each other in its order share caches."""
    try:
        run = training_run(schema, row)
    except Unpredictable:
        return ""
    parallel = replace(run.parallel, pp=1, micro_batches=1, schedule="1f1b", virtual_stages=1)
    return repr((run.stack, replace(run.model, layers=0), parallel))


def vtrain(row: Row) -> TrainingRun:
    """Megatron-DeepSpeed GPT on DGX A100 with 800 Gb/s a node: full recomputation, 1F1B, dropout."""
    tp, dp, pp = (integer(row, column) for column in ("tp", "dp", "pp"))
    hidden, micro_batch = integer(row, "hidden"), integer(row, "micro_batch_seqs")
    heads = integer(row, "heads")
    return TrainingRun(
        model=ModelShape(
            family="gpt", hidden=hidden, ffn=4 * hidden, layers=integer(row, "layers"), heads=heads, kv_heads=heads,
            vocab=padded_vocab(GPT2_VOCAB, tp), seq_len=integer(row, "seq_len"), tied_embeddings=True, dropout=True,
        ),
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, recompute="full", micro_batch=micro_batch,
            micro_batches=whole(integer(row, "global_batch_seqs"), micro_batch * dp, "global batch"),
        ),
        stack=stacks.MEGATRON_DEEPSPEED,
        cluster=cluster_of("A100-80", _same_devices(row, tp * dp * pp), "800Gb"),
    )  # fmt: skip


def _same_devices(row: Row, product: int) -> int:
    devices = integer(row, "n_gpus", product)
    if devices != product:
        raise Unpredictable(f"{devices} GPUs, but the parallel degrees make {product}")
    return devices


_FOUNDRY_CLUSTERS = {
    "h100": ("DGX-H100", "3200Gb"),
    "a100_80gb": ("A100-80", "1600Gb"),
    "a100_40gb": ("A100-40", "1600Gb"),
}
"""Node type and network of a node, by prefix of the gpu column; the A100's rate is in the file's section titles."""


def llm_foundry(row: Row) -> TrainingRun:
    """MPT models under FSDP; flash attention, decoupled AdamW."""
    seq_len, devices = integer(row, "seq_len"), integer(row, "n_gpus")
    precision, fp8 = text(row, "precision"), "fp8" in text(row, "precision")
    stack = stacks.LLM_FOUNDRY_PURE if text(row, "mp_mode") == "PURE" else stacks.LLM_FOUNDRY_DEFAULT
    if fp8:
        stack = replace(stack, dtype="float8", scaling="delayed")
    elif "bf16" not in precision:
        raise Unpredictable(f"precision {precision!r} is neither bf16 nor fp8")
    stack = replace(stack, offload_activations=flag(row, "act_offload"))
    sharding = text(row, "sharding", "FULL_SHARD")
    stages = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
    if sharding not in stages:
        raise Unpredictable(f"sharding {sharding!r} is none of {', '.join(stages)}")
    gpu = text(row, "gpu").lower()
    known = [key for key in _FOUNDRY_CLUSTERS if gpu.startswith(key)]
    cluster = cluster_of(*_between(_FOUNDRY_CLUSTERS[known[0]], devices)) if known else cluster_of(gpu, devices)
    return TrainingRun(
        model=_mpt(row, seq_len),
        parallel=ParallelShape(
            dp=devices,
            zero_stage=3 if stages[sharding] == 3 else 2 if stages[sharding] == 2 else 0,
            zero_degree=cluster.devices_per_node if sharding == "HYBRID_SHARD" else 0,
            recompute="full" if flag(row, "act_ckpt") else "none",
            micro_batch=integer(row, "micro_batch_seqs"),
            micro_batches=integer(row, "grad_accum", 1),
        ),
        stack=stack,
        cluster=cluster,
    )


def _between(node_and_rate: tuple[str, str], devices: int) -> tuple[str, int, str]:
    return node_and_rate[0], devices, node_and_rate[1]


def _mpt(row: Row, seq_len: int) -> ModelShape:
    """By name, else the GPT whose sizes give the row's parameter count."""
    try:
        return model_named(f"mpt-{text(row, 'model')}", seq_len)
    except Unpredictable:
        return gpt_of_size(integer(row, "n_params"), seq_len, MPT_VOCAB)


def neusight(row: Row) -> TrainingRun:
    """Hugging Face models in float32; pipelines split the batch into `pp_microbatches`."""
    degree, kind = integer(row, "degree", 1), text(row, "parallel", "none")
    batch = integer(row, "batch")
    degrees = {"tp": (degree, 1, 1), "pp": (1, degree, 1), "dp": (1, 1, degree)}
    tp, pp, dp = degrees.get(kind, (1, 1, 1))
    parts = integer(row, "pp_microbatches", 1) if pp > 1 else dp
    micro_batch = whole(batch, max(parts, 1), "batch")
    stack = stacks.HUGGING_FACE_EAGER
    return TrainingRun(
        model=model_named(text(row, "model"), integer(row, "seq_len")),
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, schedule="gpipe", micro_batch=micro_batch,
            micro_batches=integer(row, "pp_microbatches", 1) if pp > 1 else 1,
        ),
        stack=replace(stack, kernels="inductor") if flag(row, "fusion") else stack,
        cluster=cluster_of_gpu(text(row, "gpu"), tp * pp * dp),
        optimizer="none",
        training=text(row, "mode") == "train",
    )  # fmt: skip


_READERS: Mapping[str, Callable[[Row], TrainingRun]] = {
    "e2e_vtrain_a100_multi": vtrain,
    "e2e_vtrain_a100_single": vtrain,
    "e2e_llmfoundry_fsdp": llm_foundry,
    "e2e_megatron_bridge": bridge,
    "e2e_neusight_small": neusight,
    "e2e_mem_megatron_golden": golden,
    "e2e_mem_simumax_b200": simumax,
    "e2e_mem_torchtitan": torchtitan,
    "e2e_mem_korthikanti_a100": korthikanti,
    "e2e_mem_colossalai": colossal,
    "mem_galvatron_llama2_7b": galvatron,
    "oom_bmtrain_v100": bmtrain,
    "oom_megatron_bridge": bridge_memory,
}
