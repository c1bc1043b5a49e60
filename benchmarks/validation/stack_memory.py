"""What published training software holds beside what the lowered program says: named facts, each with its source.

    Transformer Engine with FlashAttention      a second copy of the attention's output per layer
    torch.distributed workspaces                cuBLAS: 32 MiB for each of two threads, Transformer Engine: 32 MiB
    a pipeline                                  one received and one sent activation per model chunk

A fact is data of the stack; none depends on a row's result. `FITTED` names those that were fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.validation.models import uses_rotation
from benchmarks.validation.program_memory import LossBytes
from benchmarks.validation.runs import Experts, Stack, TrainingRun

MIB = 1 << 20
DEFAULT_CUBLAS_BYTES = (2 * 4096 + 8 * 16) << 10
"""torch's default `CUBLAS_WORKSPACE_CONFIG` ":4096:2:16:8" but on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp:
`parseChosenWorkspaceSize` asks for compute capability 9.0)."""
HOPPER_CUBLAS_BYTES = 32 * MIB
"""On Hopper, and for ":4096:8", which Megatron's reproducible tests set."""
CUBLAS_THREADS = 2
"""Forward runs in the main thread, backward in autograd's: each has its own handle and workspace."""
TRANSFORMER_ENGINE_BYTES = {"ampere": 4 * MIB, "hopper": 32 * MIB}
"""`get_cublas_workspace_size_bytes` in transformer_engine/pytorch/module/base.py."""
GROUPED_STREAMS = 4
"""Streams of grouped products of Transformer Engine, each with a workspace of its own (`get_num_cublas_streams` and
`get_multi_stream_cublas_workspace` in transformer_engine/pytorch/module/base.py)."""
LOADED_MASKS = 2
"""Tests without masks hold 7 to 8 MiB less than the same with masks of 4 MiB a micro-batch."""
OVERLAPPED_STREAMS = 3
"""Parts of that engine's workspace where its products overlap with collectives in user buffers (`initialize_ub` repeats
it `_NUM_MAX_UB_STREAMS` times)."""
EXPERT_IMBALANCE = 1.18
"""Rows of the experts of a rank over their even share, summed over layers, at the fullest step of a run. Fitted: median
of the peaks of Megatron's tests with experts; without those with 4 experts 1.14, without those with 8 experts on two
ranks 1.24, without those with one expert a rank 1.20."""
BENCHMARK_BYTES = 256 * MIB
"""What triton writes between two measurements of a kernel to empty the cache (triton/testing.py: do_bench)."""
GATHERED_LAYERS = 2
RESERVED_FRACTION = 0.18
"""Of allocated bytes, what torch's allocator holds beyond them in fragments under FSDP without expandable segments. An
upper estimate: torchtitan's runs with full recomputation on H100 hold 0.147 and 0.148 (8B), 0.15 and 0.178 (405B),
0.16 and 0.24 (70B), those without 0.05 to 0.11; nothing that a row says tells which."""
DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
"""Default of reduce_bucket_size (deepspeed/runtime/zero/config.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """How a stack's memory differs from that of the graph."""

    fused: bool
    """Pointwise chains are one kernel and keep only what they read and write."""
    loss: LossBytes
    copies_attention_output: bool
    """FlashAttention inside of Transformer Engine saves its output a second time, contiguous."""
    benchmark_bytes: int
    """Held beside the compiled cross entropy while its kernels are measured."""
    offloads: bool
    """What norms, attention and routed experts of a layer save waits in host memory."""
    in_place_gradients: bool
    """Products of layers add weight gradients to the float32 buffer (Megatron's gradient accumulation fusion); that of
    the head hands autograd an empty 16-bit gradient (`LinearWithGradAccumulationAndAsyncCommunication`)."""


def facts_of(run: TrainingRun) -> StackFacts:
    """The facts of a run's stack."""
    stack = run.stack
    return StackFacts(
        fused=stack.kernels != "eager",
        loss=loss_bytes(stack, run.parallel.tp),
        offloads=stack.offload_activations,
        benchmark_bytes=BENCHMARK_BYTES if stack.compiled_loss_copies and stack.compiled_loss else 0,
        copies_attention_output=stack.kernels == "megatron" and stack.attention == "flash" and not _is_in_order(run),
        in_place_gradients=stack.kernels == "megatron" and stack.gradient_bytes == 4 and not stack.deterministic,
    )


def _is_in_order(run: TrainingRun) -> bool:
    """Whether sequences-first is batch-first already: one sequence. Models with rotary positions hold as much more all
    the same (SimuMax's runs), for a reason that no source names."""
    return run.parallel.micro_batch == 1 and not uses_rotation(run.model)


def loss_bytes(stack: Stack, tp: int) -> LossBytes:
    """Cross entropy per logit, with the logits themselves.

    Megatron (tensor_parallel/cross_entropy.py): a float32 copy beside the logits; exponentials and gradient in place.
    Its fused one (fused_cross_entropy.py) is compiled by torch and writes one more float32 copy. Transformer Engine's
    overwrites the logits with their gradient. Torch's own keeps the log-softmax in
    float32, and its backward holds that, the gradient of it and the gradient of the float32 logits together; where
    tensor parallelism cuts the vocabulary (torch/distributed/tensor/parallel/loss.py), that, its gradient, its
    exponential and their sum.
    """
    width = 4 if stack.dtype == "float32" else 2
    if stack.fused_loss:
        return LossBytes(saved=width, forward=width, backward=width)
    if stack.compiled_loss:
        most = width + 8 + stack.compiled_loss_copies
        return LossBytes(saved=4, forward=most, backward=most)
    if stack.kernels == "megatron":
        whole = 4 if width == 4 else width + 4
        return LossBytes(saved=4, forward=whole, backward=whole)
    if stack.name == "galvatron":
        return LossBytes(saved=4, forward=8, backward=8)
    if stack.name == "fsdp2" and tp > 1:
        return LossBytes(saved=4, forward=width + 12, backward=16)
    return LossBytes(saved=4, forward=width + 8 if width == 2 else 8, backward=12)


def library_bytes(run: TrainingRun) -> int:
    """Workspaces of cuBLAS and Transformer Engine, which torch's allocator hands out and never gets back."""
    name = run.cluster.device.name.lower()
    is_hopper = name.startswith(("h100", "h200", "h800", "gh200"))
    is_older = name.startswith(("a100", "a10", "a40", "a800", "v100"))
    cublas = HOPPER_CUBLAS_BYTES if is_hopper or run.stack.fixed_workspaces else DEFAULT_CUBLAS_BYTES
    engine = TRANSFORMER_ENGINE_BYTES["ampere" if is_older else "hopper"]
    if run.stack.kernels != "megatron" or run.stack.own_layers:
        return CUBLAS_THREADS * cublas
    streams = GROUPED_STREAMS if run.model.experts is not None and run.stack.grouped_experts else 0
    own = OVERLAPPED_STREAMS if run.stack.user_buffers else 1
    return CUBLAS_THREADS * cublas + engine * (own + streams)


def gathered_bytes(run: TrainingRun, sizes: Sequence[int]) -> float:
    """ZeRO-3: weights of the running layer and of the prefetched one, and one layer's gradient before it is cut.

    sizes: parameter elements of every layer of a rank. Under a pipeline FSDP2 keeps all of a stage whole for the step,
    gradients too (torchtitan: reshard_after_forward is off, gradients are reduced after the last micro-batch).
    """
    if run.parallel.zero_stage < 3 or not sizes:
        return 0.0
    stack = run.stack
    if stack.name == "fsdp2" and run.parallel.pp > 1:
        return float(sum(sizes) * (stack.gather_bytes + stack.reduce_bytes))
    largest = sorted(sizes, reverse=True)
    return float(sum(largest[:GATHERED_LAYERS]) * stack.gather_bytes + largest[0] * stack.reduce_bytes)


def gathered_tokens_bytes(run: TrainingRun) -> int:
    """Megatron's global buffer into which its dispatcher "allgather" collects the tokens of all ranks that share
    experts; it is kept (moe/token_dispatcher.py: `use_global_buffer`)."""
    parallel, shape = run.parallel, run.model
    ranks = parallel.ep * (parallel.expert_tp or parallel.tp)
    if shape.experts is None or not run.stack.gathered_experts or ranks == 1:
        return 0
    return 2 * parallel.micro_batch * (shape.seq_len // parallel.cp) * shape.hidden * ranks // parallel.tp


def kept_scores_bytes(run: TrainingRun) -> int:
    """The buffer into which Megatron's own attention writes scaled scores, kept forever in 16 bits
    (core/transformer/dot_product_attention.py asks `GlobalMemoryBuffer` for it)."""
    parallel, shape = run.parallel, run.model
    if not run.stack.own_layers or run.stack.attention != "unfused":
        return 0
    return 2 * parallel.micro_batch * shape.heads // parallel.tp * (shape.seq_len // parallel.cp) ** 2


def gathered_sequence_bytes(run: TrainingRun) -> int:
    """Buffers into which Megatron's own layers, which Galvatron uses, gather sequences that tensor parallelism cuts,
    kept forever (core/utils.py: GlobalMemoryBuffer). Two of them, as Galvatron's states with and without tensor
    parallelism differ by two at 4 and at 8 sequences."""
    parallel, shape = run.parallel, run.model
    if run.stack.name != "galvatron" or not parallel.sequence_parallel:
        return 0
    return 2 * 2 * parallel.micro_batch * shape.seq_len * shape.hidden


def deferred_bytes(run: TrainingRun) -> int:
    """What waits on the last stage for the head's weight gradients: inputs and 16-bit gradients of logits, and the
    16-bit gradient of the weight (Megatron's --defer-embedding-wgrad-compute; tensor_parallel/layers.py:
    `embedding_activation_buffer`, `grad_output_buffer`)."""
    parallel, shape = run.parallel, run.model
    waiting = min(run.stack.deferred_head_gradients, parallel.micro_batches)
    tokens = parallel.micro_batch * (shape.seq_len // parallel.cp)
    if not waiting:
        return 0
    weight = shape.vocab // parallel.tp * shape.hidden
    return 2 * (waiting * tokens * (shape.vocab // parallel.tp + shape.hidden) + weight)


def dispatched_bytes(run: TrainingRun, experts: Experts, imbalance: float) -> float:
    """What a layer of experts saves on one rank of Megatron beyond the graph's expert products, in bytes.

    The graph gathers rows inside of the product and weighs its results. Megatron writes the permuted rows
    (moe_utils.py: permute), and weighs what comes out of the activation (mlp.py, experts.py: per_token_scale), so that
    rows enter the first product and no results of the second are kept; without a fused gate both sides of the weighing
    are.
    Tensor parallelism of experts sees the rows of `expert_tp` ranks. The fullest rank gets `imbalance` times its share.
    """
    parallel, shape = run.parallel, run.model
    again = parallel.recompute_modules if parallel.recompute == "selective" else ()
    if parallel.recompute == "full" or "moe" in again:
        return 0.0
    expert_tp = parallel.expert_tp or parallel.tp
    chosen = parallel.micro_batch * (shape.seq_len // parallel.cp) * experts.per_token
    rows, width = chosen * expert_tp / parallel.tp, experts.hidden / expert_tp
    is_gated = shape.gated or shape.family in ("llama", "moe")
    activations = 0 if "moe_act" in again else 1 if is_gated else 2
    kept = rows * (shape.hidden + width * (2 if is_gated else 1) + width * activations)
    graph = rows * width * (2 if is_gated else 1) + chosen * shape.hidden + (0 if "moe_act" in again else rows * width)
    return 2.0 * (imbalance * kept - graph)


def router_bytes(run: TrainingRun) -> int:
    """The float32 copy of its input that the router of a layer keeps (megatron/core/transformer/moe/moe_utils.py:
    `router_gating_linear` before it kept 16 bits)."""
    parallel, shape = run.parallel, run.model
    again = parallel.recompute_modules if parallel.recompute == "selective" else ()
    if shape.experts is None or not shape.experts.wide_router or parallel.recompute == "full" or "moe" in again:
        return 0
    tokens = parallel.micro_batch * (shape.seq_len // parallel.cp) // (parallel.tp if parallel.sequence_parallel else 1)
    return 4 * tokens * shape.hidden


def gathered_input_bytes(run: TrainingRun) -> int:
    """The whole sequences that DTensor's product with a vocabulary cut over tensor parallelism keeps for backward;
    Megatron gathers them again."""
    parallel, shape = run.parallel, run.model
    if run.stack.name != "fsdp2" or not parallel.sequence_parallel:
        return 0
    return 2 * parallel.micro_batch * (shape.seq_len // parallel.cp) * shape.hidden


def kept_projections(run: TrainingRun) -> int:
    """Bytes that torchtitan's selective recomputation keeps per layer beyond ours, negative where it keeps less.

    It keeps every other product of query, key, value, output, gate, up and down; ours are fused to query-key-value and
    gate-up, of which key and up would be made again, while down is kept.
    """
    shape, parallel = run.model, run.parallel
    if parallel.recompute != "selective" or "second_matmul" not in parallel.recompute_modules:
        return 0
    head = shape.head_dim or shape.hidden // shape.heads
    tokens = parallel.micro_batch * (shape.seq_len // parallel.cp)
    return 2 * tokens * (shape.hidden - shape.ffn - head * shape.kv_heads) // parallel.tp


def bucket_bytes(run: TrainingRun) -> float:
    """DeepSpeed's buckets of gradients, two of them, which reductions fill in turn (ZeRO 2 and 3)."""
    if run.stack.name != "deepspeed" or run.parallel.zero_stage < 2:
        return 0.0
    return float(2 * DEEPSPEED_BUCKET_ELEMENTS * run.stack.reduce_bytes)


def mask_bytes(run: TrainingRun) -> int:
    """Masks that Megatron's loader makes, one byte per pair of positions (--create-attention-mask-in-dataloader): of
    the running micro-batch and of the one before."""
    shape, parallel = run.model, run.parallel
    if not run.stack.loads_masks:
        return 0
    return LOADED_MASKS * parallel.micro_batch * (shape.seq_len // parallel.cp) * shape.seq_len


def leftover_bytes(run: TrainingRun, border: int) -> float:
    """Tensors that outlive a step: a received and a sent activation of `border` bytes per model chunk."""
    parallel = run.parallel
    keeps = parallel.pp > 1 and run.stack.name != "galvatron"  # gpipe hands all of them back
    return float(2 * parallel.virtual_stages * border if keeps else 0)


def encoded_bytes(run: TrainingRun) -> int:
    """The encoder's output on one rank, which all layers of a decoder read."""
    shape, parallel = run.model, run.parallel
    if shape.family != "t5":
        return 0
    width = 4 if run.stack.dtype == "float32" else 2
    tokens = parallel.micro_batch * shape.seq_len // (parallel.tp if parallel.sequence_parallel else 1)
    return width * tokens * shape.hidden


def unsplit_queries_bytes(run: TrainingRun) -> int:
    """What the graph counts twice of one layer's queries where several share a key: they are copied out of the product
    of query, key and value, and keys and values too, so that the product itself goes (get_qkv_layout in
    transformer_engine/pytorch/attention: contiguous copies where no layout fits)."""
    shape, stack = run.model, run.stack
    is_copied = stack.kernels == "megatron" and stack.attention != "unfused" and shape.latent is None
    if not is_copied or uses_rotation(shape) or shape.kv_heads == shape.heads:
        return 0
    return attention_output_bytes(run)


def attention_output_bytes(run: TrainingRun) -> int:
    """16-bit output of one layer's attention on one rank."""
    shape, parallel = run.model, run.parallel
    head = shape.head_dim or shape.hidden // shape.heads
    width = shape.heads * (shape.latent.value_head if shape.latent is not None else head)
    return 2 * parallel.micro_batch * (shape.seq_len // parallel.cp) * width // parallel.tp
