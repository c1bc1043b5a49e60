"""Rows of published recipes: Megatron-Bridge's performance summaries, torchtitan, ColossalAI, Galvatron."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from benchmarks.validation import stacks
from benchmarks.validation.fields import Row, Unpredictable, cluster_of, flag, integer, number, text, whole
from benchmarks.validation.runs import ModelShape, ParallelShape, Stack, TrainingRun
from benchmarks.validation.shapes import model_named

_PRECISIONS: dict[
    str, tuple[Literal["bfloat16", "float8", "float4"], Literal["none", "tensor", "row", "block32", "block16"]]
] = {
    "": ("float8", "tensor"),
    "BF16": ("bfloat16", "none"),
    "FP8": ("float8", "tensor"),
    "FP8-CS": ("float8", "tensor"),
    "FP8-SC": ("float8", "row"),
    "FP8-MX": ("float8", "block32"),
    "MXFP8": ("float8", "block32"),
    "NVFP4": ("float4", "block16"),
}
"""Bridge's names (CS: current scaling of tensors, SC: blocks of a sub-channel); 25.09 names none and ran FP8."""

_LORA_RANK = 16
"""Of Bridge's LoRA recipes (peft/lora.py), from memory."""


def bridge(row: Row) -> TrainingRun:
    """Megatron-Bridge recipes; of a field "a (b)" the first value, as its measurement."""
    tp, pp, cp, ep = (integer(row, column, 1) for column in ("tp", "pp", "cp", "ep"))
    devices, micro_batch, chunks = integer(row, "n_gpus"), integer(row, "mbs"), integer(row, "vp", 1)
    system, name, sharded = text(row, "system"), text(row, "model"), integer(row, "fsdp", 0)
    model = _packed_vocab(model_named(name, integer(row, "seq_len")), tp)
    dp = whole(devices, tp * pp * cp, "number of GPUs")
    modules = _bridge_recompute(name, system)
    return TrainingRun(
        model=model,
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, expert_tp=1,
            virtual_stages=chunks if pp > 1 else 1,
            zero_stage=3 if sharded else 1,
            zero_degree=min(sharded, dp * cp),
            sequence_parallel=tp > 1,
            recompute="selective" if modules else "none",
            recompute_modules=modules,
            schedule="interleaved" if pp > 1 and chunks > 1 else "1f1b",
            micro_batch=micro_batch,
            micro_batches=whole(integer(row, "gbs"), micro_batch * dp, "global batch"),
        ),
        stack=_bridge_stack(row, model, fsdp=bool(sharded)),
        cluster=cluster_of(system, devices),
        adapter_rank=_LORA_RANK if "LoRA" in text(row, "task") else 0,
    )  # fmt: skip


def _packed_vocab(model: ModelShape, tp: int) -> ModelShape:
    """Megatron pads the vocabulary to a multiple of 128 per tensor-parallel rank."""
    multiple = 128 * tp
    return replace(model, vocab=-(-model.vocab // multiple) * multiple)


def _bridge_recompute(model: str, system: str) -> tuple[str, ...]:
    """From scripts/performance/configs/*/*_workload_base_configs.py: what most versions of a recipe recompute."""
    if "DeepSeek" in model:
        return ("mla_up_proj", "mlp") if "H100" in system else ("mla_up_proj",)
    if "Nemotron" in model and "H100" in system:
        return ("moe", "layernorm", "core_attn", "moe_act")
    return ()


_WHOLE_GRAPH_SINCE = 26.06
"""Container from which MXFP8 recipes with experts launch a step as one graph and exchange tokens beside compute
(configs/deepseek/deepseek_workload_base_configs.py: cuda_graph_impl "full_iteration", moe_a2a_overlap)."""
_LAYER_GRAPHS_SINCE = 26.02
"""Container from which they launch attention and router as graphs of layers (cuda_graph_scope of the same file)."""


def _bridge_stack(row: Row, model: ModelShape, *, fsdp: bool) -> Stack:
    precision, system = text(row, "precision"), text(row, "system")
    if precision.upper() not in _PRECISIONS:
        raise Unpredictable(f"precision {precision!r} is none of {', '.join(filter(None, _PRECISIONS))}")
    dtype, scaling = _PRECISIONS[precision.upper()]
    container = number(row, "container", 0.0)
    whole_graph = container >= _WHOLE_GRAPH_SINCE and scaling == "block32" and "H100" not in system
    layer_graphs = container >= _LAYER_GRAPHS_SINCE and "H100" not in system
    return replace(
        stacks.MEGATRON,
        name="megatron-bridge",
        dtype=dtype,
        scaling=scaling,
        overlap_gradients=True,
        overlap_parameters=True,
        overlap_tensor=True,
        fused_loss=True,
        cuda_graph="none" if model.experts is None else "step" if whole_graph else "layers" if layer_graphs else "none",
        forwards_tokens=True,
        overlap_exchanges=whole_graph,
        offload_activations=fsdp and "GB" in system,
        expandable_segments=True,
    )


def torchtitan(row: Row) -> TrainingRun:
    """FSDP2 with float8 and torch.compile; a pipeline runs micro-batches of one sequence."""
    tp, pp, cp = (integer(row, column, 1) for column in ("tp", "pp", "cp"))
    devices, local_batch = integer(row, "n_gpus"), integer(row, "local_batch_seqs")
    dp = whole(devices, tp * pp * cp, "number of GPUs")
    schedule = text(row, "schedule", "1F1B").lower()
    micro_batch = 1 if pp > 1 else local_batch
    return TrainingRun(
        model=model_named(text(row, "model"), integer(row, "seq_len")),
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, cp=cp, zero_stage=3, zero_degree=min(integer(row, "fsdp", dp) * cp, dp * cp),
            virtual_stages=2 if pp > 1 and "interleaved" in schedule else 1,
            sequence_parallel=tp > 1,
            recompute=_titan_recompute(text(row, "act_ckpt", "none")),
            recompute_modules=("pointwise", "second_matmul"),
            schedule="interleaved" if pp > 1 and "interleaved" in schedule else "1f1b",
            micro_batch=micro_batch,
            micro_batches=local_batch // micro_batch,
        ),
        stack=_titan_stack(row),
        cluster=cluster_of(_titan_node(text(row, "hw")), devices),
    )  # fmt: skip


def _titan_recompute(name: str) -> Literal["none", "selective", "full"]:
    modes: dict[str, Literal["none", "selective", "full"]] = {
        "none": "none", "selective": "selective", "full": "full",
    }  # fmt: skip
    if name not in modes:
        raise Unpredictable(f"activation checkpointing {name!r} is none of {', '.join(modes)}")
    return modes[name]


def _titan_node(hw: str) -> str:
    """ "H100 96GB HBM2e ..., 8/node ..." by the GPU it begins with; the 96 GB H100 is a part of its own."""
    found = re.match(r"(?:NVIDIA )?([A-Z]+\d+)", hw)
    if found is None:
        raise Unpredictable(f"no GPU is named in {hw!r}")
    return "Grand-Teton" if found[1] == "H100" and "96" in hw else found[1]


def _titan_stack(row: Row) -> Stack:
    precision = text(row, "precision", "bf16")
    stack = replace(
        stacks.TORCHTITAN,
        kernels="inductor" if flag(row, "torch_compile") else "eager",
        overlap_tensor="AsyncTP" in text(row, "technique"),
    )
    if not precision.startswith("float8"):
        return stack
    rowwise = "rowwise" in precision
    return replace(stack, dtype="float8", scaling="row" if rowwise else "tensor", gather_bytes=2 if rowwise else 1)


_COLOSSAL_MODELS = {"7B": "llama2-7b", "8B": "llama3-8b", "13B": "llama2-13b", "70B": "llama2-70b"}


def colossal(row: Row) -> TrainingRun:
    """ColossalAI's LLaMA runs: "zero2(dp8)" or "zero1(dp2)+tp2+pp4"; pipelines of micro-batches of one sequence."""
    plan = text(row, "parallelism")
    zero = re.search(r"zero(\d)", plan)
    tp, pp = (int(found[1]) if (found := re.search(rf"{axis}(\d+)", plan)) else 1 for axis in ("tp", "pp"))
    devices, batch = integer(row, "n_gpus"), integer(row, "batch_per_dp")
    replicas = re.search(r"dp(\d+)", plan)
    if replicas and int(replicas[1]) * tp * pp != devices:
        raise Unpredictable(f"{plan} takes {int(replicas[1]) * tp * pp} GPUs, not {devices}")
    stage = int(zero[1]) if zero else 0
    dp = whole(devices, tp * pp, f"number of GPUs ({plan})")
    name = text(row, "model")
    return TrainingRun(
        model=model_named(_COLOSSAL_MODELS.get(name, name), integer(row, "seq_len")),
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, zero_stage=1 if stage == 1 else 2 if stage == 2 else 3 if stage == 3 else 0,
            recompute="full", micro_batch=1 if pp > 1 else batch, micro_batches=batch if pp > 1 else 1,
        ),
        stack=stacks.COLOSSAL_AI,
        cluster=cluster_of(text(row, "gpu"), devices),
    )  # fmt: skip


def galvatron(row: Row) -> TrainingRun:
    """Galvatron's memory profile of Llama-2 7B on 8 GPUs (taken as A100-80): "1_4_2_vtp_c_sp" is pp_tp_dp, options.

    vtp: embedding and head are tensor-parallel too; c: recomputation; states are cut over tp x dp (its figures per
    layer are 16 bytes a parameter over 8 devices).
    """
    fields = text(row, "strategy_pp_tp_dp").split("_")
    if len(fields) < 3 or not all(field.isdigit() for field in fields[:3]):
        raise Unpredictable(f"strategy {text(row, 'strategy_pp_tp_dp')!r} is no plan but a figure derived from several")
    pp, tp, dp = map(int, fields[:3])
    model = model_named("llama2-7b", integer(row, "seq"))
    return TrainingRun(
        model=replace(model, layers=integer(row, "layers")),
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, zero_stage=3, sequence_parallel=tp > 1, schedule="gpipe",
            recompute="full" if "c" in fields[3:] else "none",
            micro_batch=whole(integer(row, "global_bsz"), dp, "global batch"), micro_batches=1,
        ),
        stack=replace(stacks.GALVATRON, whole_vocabulary="vtp" not in fields),
        cluster=cluster_of("A100-80", 8),
    )  # fmt: skip
