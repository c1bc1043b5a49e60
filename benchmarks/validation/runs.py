"""A published training run as values: which model, split how, run by which software, on which cluster.

Every file of step times, memory peaks and out-of-memory outcomes is read into these types (`rows.py`), and only
these are predicted (`road.py`), so that a row of a file nobody has seen takes the same road.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.cost_models.sustained import AttentionKernel
from autopar.hardware.cluster import Cluster


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
    groups: int = 1
    groups_per_token: int = 1
    """Routing takes a token's experts out of so many groups of equally many, one behind the other."""
    wide_router: bool = False
    """The router computes on a float32 copy of its input, which is saved."""


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
class StateSpace:
    """The Mamba-2 layers of a hybrid model."""

    heads: int
    head_dim: int
    state: int
    """Width of the state of one head."""
    groups: int = 8
    """Groups that share input and output projections of the state."""
    conv: int = 4


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
    biases: bool = True
    """gpt, bert, t5: linear layers have biases."""
    decoder_seq_len: int = 0
    """t5: `layers` encoder layers over `seq_len` and as many decoder layers over this; 0: no encoder."""
    window: int = 0
    """Every other layer attends to this many positions only; 0: all to all."""
    extra_predictions: int = 0
    """Multi-token prediction: one further layer, norm and pass through the head for each."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    state_space: StateSpace | None = None
    pattern: str = ""
    """hybrid: one letter per layer: M state-space, * attention, - dense MLP, E experts."""


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
    layers_per_chunk: tuple[int, ...] = ()
    """Layers of every model chunk, in model order; empty: equal shares."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    zero_degree: int = 0
    """Devices over which states are cut; 0: dp * cp."""
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """What selective recomputation drops: core_attn, layernorm, mlp, moe, moe_act, shared_experts, mla_up_proj;
    pointwise and second_matmul: all but attention and every other product, as torchtitan's policy by operators."""
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
    dtype: Literal["float32", "float16", "bfloat16", "float8", "float4"] = "bfloat16"
    """Of matrix products; below 16 bits, activations and norms stay bfloat16."""
    scaling: Literal["none", "tensor", "delayed", "row", "block32", "block16"] = "none"
    """Which elements share a scale of a float8 or float4 product; delayed: of the whole tensor, from earlier steps."""
    kernels: Literal["eager", "inductor", "megatron"] = "megatron"
    """Who groups element-wise operators (`graphs/kernel_groups.py`)."""
    attention: Literal["flash", "fused", "unfused"] = "flash"
    attention_kernel: AttentionKernel = "vendor"
    """Whose fused kernel: Transformer Engine picks the vendor's where it is faster, PyTorch calls FlashAttention-2."""
    parameter_bytes: int = 2
    """Of one weight as it stays on the device between steps (FSDP: the float32 shard, which is the master too)."""
    gradient_bytes: int = 4
    """Of the buffer that gradients accumulate in."""
    optimizer_bytes: float = 12.0
    """Moments per parameter, and master weights beside `parameter_bytes` (Adam with a float32 master copy: 12)."""
    reduce_bytes: int = 4
    """Of one gradient element while it is reduced."""
    overlap_gradients: bool = False
    """Gradient reductions run beside backward."""
    overlap_parameters: bool = False
    """Gathers of ZeRO run beside compute."""
    gather_bytes: int = 2
    """Of one parameter while ZeRO gathers it."""
    overlap_tensor: bool = False
    """Collectives of tensor parallelism run in pieces beside the matrix product (async TP)."""
    loads_masks: bool = False
    """The data loader makes a mask of attention for every sequence."""
    layer_masks: bool = False
    """Each layer of BERT keeps a mask of its own, which attention makes of the padded positions."""
    user_buffers: bool = False
    """Transformer Engine overlaps products of tensor parallelism with their collectives (--tp-comm-overlap)."""
    fused_loss: bool = False
    """Cross entropy keeps no float32 copy of the logits."""
    deferred_head_gradients: int = 0
    """Micro-batches whose weight gradient of the head waits for the pipeline to run empty."""
    compiled_loss: bool = False
    """Megatron's own fused cross entropy, compiled by torch: one float32 copy more than the plain one."""
    compiled_loss_copies: int = 0
    """Further bytes per logit while an older torch measures variants of its kernels."""
    offload_activations: bool = False
    """Saved activations wait in host memory."""
    precision_aware: bool = False
    """Transformer Engine's Adam keeps 16-bit moments, and of the master weights what 16-bit weights lack."""
    keeps_transposes: bool = False
    """float8 weights stand on the device transposed too, where products read one order of operands alone (Hopper)."""
    expandable_segments: bool = False
    """The allocator grows segments in place: next to no fragmentation."""
    whole_vocabulary: bool = False
    """Under tensor parallelism every rank computes with whole embeddings and a whole head, gathered as ZeRO-3 does."""
    grouped_experts: bool = True
    """Products of experts are grouped kernels; else one expert after another."""
    gathered_experts: bool = False
    """Tokens of expert parallelism are gathered whole (Megatron's dispatcher "allgather"); else exchanged."""
    own_layers: bool = False
    """Megatron's own layers ("local") in place of Transformer Engine's: scores of attention stand in a kept buffer."""
    fixed_workspaces: bool = False
    """CUBLAS_WORKSPACE_CONFIG=":4096:8", as reproducible products need."""
    forwards_tokens: bool = False
    """Exchanges send a token once per node and forward it inside (DeepEP, HybridEP)."""
    overlap_exchanges: bool = False
    """Exchanges of one micro-batch run beside the compute of another."""
    cuda_graph: Literal["none", "layers", "step"] = "none"
    """Which kernels the host launches as one: none; those of layers, but what moves tokens between experts; all."""
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
    adapter_rank: int = 0
    """LoRA: only low-rank adapters of this rank are trained; 0: all parameters."""
