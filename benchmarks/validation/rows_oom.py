"""Rows of out-of-memory studies: BMTrain against DeepSpeed on V100, and Megatron-Bridge's recomputation studies.

Both write the configuration as text: "GPT-2 13B: 40 layers, 128 heads, 5120 hidden, seq 512" and
"Moonlight-16B bf16 seq4096 mbs1 gbs4 tp2 pp1 cp1 ep8".
"""

from __future__ import annotations

import re
from dataclasses import replace

from benchmarks.validation import stacks
from benchmarks.validation.fields import Row, Unpredictable, cluster_of, integer, text, whole
from benchmarks.validation.runs import ModelShape, ParallelShape, Stack, TrainingRun
from benchmarks.validation.shapes import GPT2_VOCAB, model_named, padded_vocab


def bmtrain(row: Row) -> TrainingRun:
    """BMTrain's comparison: every block recomputed; "ZeRO2 mp4" is DeepSpeed with tensor parallelism of 4.

    The batch is per GPU: a replica of mp GPUs takes mp times as many sequences. BMTrain itself cuts states as ZeRO-3.
    """
    shape, strategy, hardware = _described(text(row, "model")), text(row, "strategy"), text(row, "hw")
    nodes, per_node, gpu = _machine(hardware)
    zero = re.search(r"zero-?(\d)", strategy, re.IGNORECASE)
    split = re.search(r"mp(\d+)", strategy)
    tp, own = int(split[1]) if split else 1, zero is None
    stage = 3 if own else int(zero[1]) if zero else 0
    batch = integer(row, "batch_size_per_gpu")
    return TrainingRun(
        model=replace(shape, vocab=padded_vocab(GPT2_VOCAB, tp)),
        parallel=ParallelShape(
            tp=tp, dp=whole(nodes * per_node, tp, "number of GPUs"),
            zero_stage=3 if stage == 3 else 2 if stage == 2 else 1 if stage == 1 else 0,
            recompute="full", micro_batch=batch * tp, micro_batches=1,
        ),
        stack=stacks.BMTRAIN if own else stacks.DEEPSPEED_V100,
        cluster=cluster_of(gpu, nodes * per_node),
    )  # fmt: skip


def _described(model: str) -> ModelShape:
    """The GPT of a text that names layers, heads, hidden and seq; raises Unpredictable where one is missing."""
    found = {
        "layers": re.search(r"(\d+)\s*layers", model),
        "heads": re.search(r"(\d+)\s*heads", model),
        "hidden": re.search(r"(\d+)\s*hidden", model),
        "seq": re.search(r"seq\s*(\d+)", model),
    }
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise Unpredictable(f"model {model!r} does not say {', '.join(missing)}")
    layers, heads, hidden, seq = (int(match[1]) for match in found.values() if match)
    return ModelShape(
        family="gpt", hidden=hidden, ffn=4 * hidden, layers=layers, heads=heads, kv_heads=heads, vocab=GPT2_VOCAB,
        seq_len=seq, tied_embeddings=True, dropout=True,
    )  # fmt: skip


def _machine(hardware: str) -> tuple[int, int, str]:
    """Nodes, GPUs per node and GPU of "4 nodes x 8 V100 (size not stated)"."""
    found = re.match(r"(\d+)\s*nodes?\s*x\s*(\d+)\s*x?\s*([A-Za-z]+\d+\w*(?:-\d+)?)", hardware)
    if found is None:
        raise Unpredictable(f"hardware {hardware!r} is not written as '4 nodes x 8 V100'")
    return int(found[1]), int(found[2]), found[3]


def bridge_memory(row: Row) -> TrainingRun:
    """Megatron-Bridge's recomputation studies; `varied` lists the modules that are recomputed."""
    config, varied = text(row, "config"), text(row, "varied")
    degrees = {name: int(value) for name, value in re.findall(r"\b(seq|mbs|gbs|tp|pp|cp|ep|vpp|dp)(\d+)", config)}
    missing = [name for name in ("seq", "mbs", "gbs", "tp", "pp") if name not in degrees]
    if missing:
        raise Unpredictable(f"configuration {config!r} does not say {', '.join(missing)}")
    devices, tp, pp, cp = integer(row, "n_gpus"), degrees["tp"], degrees["pp"], degrees.get("cp", 1)
    dp, chunks = whole(devices, tp * pp * cp, "number of GPUs"), degrees.get("vpp", 1)
    modules = tuple(re.findall(r"core_attn|layernorm|mlp|moe_act|shared_experts|mla_up_proj|moe\b", varied))
    model = model_named(config.split()[0], degrees["seq"])
    fp8 = "fp8" in config
    return TrainingRun(
        model=replace(model, vocab=padded_vocab(model.vocab, tp)),
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, cp=cp, ep=degrees.get("ep", 1), expert_tp=1, virtual_stages=chunks, zero_stage=1,
            sequence_parallel=tp > 1, recompute="selective" if modules else "none", recompute_modules=modules,
            schedule="interleaved" if chunks > 1 else "1f1b", micro_batch=degrees["mbs"],
            micro_batches=whole(degrees["gbs"], degrees["mbs"] * dp, "global batch"),
        ),
        stack=replace(
            _bridge_widths(config), name="megatron-bridge", dtype="float8" if fp8 else "bfloat16",
            scaling="tensor" if fp8 else "none", overlap_gradients=True, overlap_parameters=True, fused_loss=True,
            expandable_segments="expandable" in varied,
        ),
        cluster=cluster_of(text(row, "hw"), devices),
    )  # fmt: skip


def _bridge_widths(config: str) -> Stack:
    """Moonlight's recipe keeps gradients and both moments in bfloat16 (use_precision_aware_optimizer, main_grads_dtype,
    exp_avg_dtype in src/megatron/bridge/recipes/moonlight), and 16 bits of each master weight."""
    if "Moonlight" not in config:
        return stacks.MEGATRON
    return replace(stacks.MEGATRON, gradient_bytes=2, reduce_bytes=2, optimizer_bytes=6.0, precision_aware=True)
