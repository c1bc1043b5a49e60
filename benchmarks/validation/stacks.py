"""The training software of published runs, as data: what each does to dtypes, kernels and communication.

A preset says what its source or its documentation says; rows change single fields with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.validation.runs import Stack

MEGATRON_DEEPSPEED = Stack(
    name="megatron-deepspeed",
    dtype="float16",
    kernels="megatron",
    attention="unfused",
    gradient_bytes=2,
    optimizer_bytes=12.0,
    reduce_bytes=2,
)
"""Of vTrain's runs (2022): fp16 gradients, fused softmax kernel, gradients reduced after backward."""

MEGATRON = Stack(name="megatron")
"""Megatron Core with Transformer Engine: bf16 weights, float32 gradient buffer, master weights and moments."""

MEGATRON_FP16 = replace(MEGATRON, dtype="float16", gradient_bytes=2, reduce_bytes=2)
"""Gradients accumulate in float32 with bf16 only (megatron/training/arguments.py)."""

MEGATRON_FP32 = replace(MEGATRON, dtype="float32", parameter_bytes=4, optimizer_bytes=8.0, gather_bytes=4)

MEGATRON_2022 = replace(MEGATRON, attention="unfused")
"""Korthikanti et al. 2022: as Megatron, with a fused softmax kernel in place of flash attention."""

_FSDP = Stack(
    name="fsdp2",
    kernels="eager",
    attention_kernel="flash2",
    parameter_bytes=4,
    gradient_bytes=4,
    optimizer_bytes=8.0,
    reduce_bytes=4,
    overlap_gradients=True,
    overlap_parameters=True,
)

TORCHTITAN = _FSDP
"""FSDP2: float32 shards that are the master weights, gathered as bf16, gradients reduced in float32."""

LLM_FOUNDRY_PURE = replace(_FSDP, name="llm-foundry", attention_kernel="flash1", reduce_bytes=2)
"""Composer's PURE mixed precision of FSDP: weights gathered and gradients reduced in 16 bits."""

LLM_FOUNDRY_DEFAULT = replace(LLM_FOUNDRY_PURE, gather_bytes=4)
"""Composer's DEFAULT mixed precision of FSDP: float32 weights under autocast, gradients reduced in 16 bits (from
memory of composer/trainer/mosaic_fsdp_utils.py)."""

HUGGING_FACE_EAGER = Stack(
    name="torch-eager",
    dtype="float32",
    kernels="eager",
    attention="unfused",
    parameter_bytes=4,
    gradient_bytes=4,
    optimizer_bytes=0.0,
    reduce_bytes=4,
    gather_bytes=4,
)
"""NeuSight's labels: float32 models of Hugging Face, attention of single operators, no optimizer step."""

GALVATRON = Stack(name="galvatron", kernels="eager", gradient_bytes=2, optimizer_bytes=12.0, reduce_bytes=2)
"""Galvatron: FSDP in bf16, flash attention; 16 bytes of state per parameter."""

COLOSSAL_AI = replace(GALVATRON, name="colossal-ai")

DEEPSPEED_V100 = replace(GALVATRON, name="deepspeed", dtype="float16", attention="unfused")

BMTRAIN = replace(DEEPSPEED_V100, name="bmtrain", overlap_gradients=True, overlap_parameters=True)
