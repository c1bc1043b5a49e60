"""A published training run as values: which model, split how, run by which software, on which cluster.

Every file of step times, memory peaks and out-of-memory outcomes is read into these types (`rows.py`), and only
these are predicted (`road.py`), so that a row of a file nobody has seen takes the same road.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture-of-experts part of a model."""

    count: int
    per_token: int
    hidden: int
    """Inner width of one expert."""
    shared_hidden: int = 0
    """Inner width of the experts that every token passes; 0: none."""
    dense_layers: int = 0
    """First layers that have a dense MLP instead."""
    every: int = 1
    """Every n-th layer has experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): ranks of the low-rank projections and widths of a head."""

    query_rank: int
    """0: queries are projected directly."""
    key_value_rank: int
    nope_head: int
    rope_head: int
    value_head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer by its sizes; all counts are of elements, layers or heads."""

    family: Literal["gpt", "llama", "bert", "t5", "moe", "hybrid"]
    """gpt: layer norm, GELU MLP, learned positions; llama: RMS norm, gated MLP, rotary positions; moe: llama with
    `experts`; hybrid: state-space layers too (`pattern`)."""
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    seq_len: int
    head_dim: int = 0
    """0: hidden // heads."""
    tied_embeddings: bool = False
    dropout: bool = False
    gated: bool = False
    """SwiGLU in place of GELU; llama and moe are gated always."""
    decoder_seq_len: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    pattern: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelShape:
    """How the run is split; degrees multiply to the number of devices (cp and dp share ZeRO's splits)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 0
    """Tensor parallelism inside experts; 0: that of the model."""
    virtual_stages: int = 1
    """Model chunks per device of an interleaved schedule."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    zero_degree: int = 0
    """Devices over which states are cut; 0: dp * cp."""
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = None
    """Layers that recompute, where not all do."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"] = "1f1b"
    micro_batch: int = 1
    """Sequences that one model replica takes at once."""
    micro_batches: int = 1
    """Micro-batches per step and replica (gradient accumulation counts)."""

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.micro_batch * self.micro_batches * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The software, by what it does to kernels, dtypes and communication (physics, never a fudge)."""

    name: str
    """ "megatron", "megatron-deepspeed", "fsdp2", "llm-foundry", "torch-eager", ..."""
    dtype: Literal["float32", "float16", "bfloat16", "float8"] = "bfloat16"
    kernels: Literal["eager", "inductor", "megatron"] = "megatron"
    """Who groups element-wise operators (`cost_models/kernel_groups.py`)."""
    attention: Literal["flash", "fused", "unfused"] = "flash"
    parameter_bytes: int = 2
    """Of the weights that compute reads."""
    gradient_bytes: int = 4
    """Of the buffer that gradients accumulate in."""
    optimizer_bytes: float = 12.0
    """Master weights and moments per parameter (fp32 Adam with master copy: 12)."""
    reduce_bytes: int = 4
    """Of one gradient element while it is reduced."""
    overlap_gradients: bool = False
    """Gradient reductions run beside backward."""
    overlap_parameters: bool = False
    """Gathers of ZeRO run beside compute."""
    fsdp_keeps_gathered: bool = False
    """ZeRO-3 parameters stay gathered between forward and backward."""
    cuda_graph: bool = False
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One row: everything that a prediction of step seconds and peak bytes may read."""

    model: ModelShape
    parallel: ParallelShape
    stack: Stack
    cluster: Cluster
    optimizer: str = "AdamW"
    training: bool = True
    """False: forward only."""
