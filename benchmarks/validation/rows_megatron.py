"""Rows of Megatron-LM runs: its functional tests, Korthikanti et al. 2022, and SimuMax's B200 measurements.

Megatron's arguments have defaults that the files leave out; they stand here with the argument they are of.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from benchmarks.validation import stacks
from benchmarks.validation.fields import Row, Unpredictable, cluster_of, flag, integer, smallest_world, text, whole
from benchmarks.validation.runs import (
    Experts,
    LatentAttention,
    ModelShape,
    ParallelShape,
    Stack,
    StateSpace,
    TrainingRun,
)
from benchmarks.validation.shapes import model_named, padded_vocab

Recompute = Literal["none", "selective", "full"]
Family = Literal["gpt", "llama", "bert", "t5", "moe", "hybrid"]

_VOCABULARIES = {
    "GPT2BPE(default)": 50257,
    "BertWordPieceCase": 29096,
    "GPTSentencePieceTokenizer": 256000,
    "NullTokenizer": 131073,
    "Llama2Tokenizer": 32000,
    "HuggingFaceTokenizer": 151936,
    "TikTokenizer": 131072,
}
"""Entries of the tokenizers that Megatron's tests name (BERT's cased one with T5's 100 extra ids; NullTokenizer as
gpt3_7b_tp1_pp4_memory_speed sets it; TikToken as Nemotron's)."""
_BERT_CASED_VOCAB = 28996
_SMALL_T5 = 768
"""Hidden width of the tests' small T5 (12 + 12 layers); the large one (4096) has 24 + 24."""
_NULL_TOKENIZER_SMALL = 50257
"""--vocab-size of the small tests with NullTokenizer."""
_EXPERT_WIDTH = 1024
"""--moe-ffn-hidden-size of the tests gpt3_moe_* and deepseek_proxy_*; in others experts are as wide as dense MLPs."""
_EXPERT_RECOMPUTE = ("layernorm", "mla_up_proj", "mlp", "moe_act")
"""--recompute-modules of the tests *_ep4_etp1_*."""
_TEST_LATENT = LatentAttention(query_rank=1536, key_value_rank=512, nope_head=128, rope_head=64, value_head=128)
"""Of the tests *_ep4_etp1_*, which have 3 dense layers, shared experts of 1024 and, unless their name says no_mtp, one
extra prediction."""
_PROXY_LATENT = LatentAttention(query_rank=256, key_value_rank=128, nope_head=128, rope_head=64, value_head=128)
"""Of the test deepseek_proxy_fsdp_*, with 3 dense layers and shared experts of 1024."""
_SMALL_LATENT = LatentAttention(query_rank=192, key_value_rank=64, nope_head=16, rope_head=8, value_head=16)
"""Of the test gpt3_*_mla."""


_GROUPED = ("groupedGEMM", "top2router", "ddp_average", "etp1")
"""Parts of the names of tests with "experts" that set --moe-grouped-gemm."""
_EXCHANGED = ("gpt3_moe_mcore_te_tp4", "etp1", "deepseek", "mixtral")
"""Parts of the names of tests that set --moe-token-dispatcher-type alltoall."""
_DEFERRAL_LIMIT = 2
"""--wgrad-deferral-limit of the tests *_defer_embedding_wgrad_compute."""
_LARGE = 2048
"""Tests of this width and above follow a published recipe: no dropout, no biases."""

_LAYOUTS = {
    "uneven_pipeline": (2, 4, 4, 2),
    "ep4_etp1_selective_recompute_experimental": (3, 2, 2, 2, 2, 2, 2, 1),
    "ep4_etp1": (3, 2, 2, 2, 2, 2, 2, 0),
    "scoped_cudagraph": (1, 2, 2, 2, 2, 2, 2, 0),
}
"""Layers of every model chunk, by a part of a test's name, where it sets --decoder-first-pipeline-num-layers or
--pipeline-model-parallel-layout."""
_RELEASE_GPUS = {"mixtral_8x7b": 64}
"""GPUs of release tests on more nodes than their row names."""
_OWN_RECIPE = "memory_speed"
"""Part of the name of large tests that keep Megatron's defaults: dropout, biases."""
_BLACKWELL = ("GB200", "B200", "GB300", "B300")

_UNTOLD = {
    "grpo": "reinforcement learning: the row does not say what generation holds",
    "distill": "distillation: the row does not say what the teacher is",
    "15b_8t_release": "release tests run on more nodes than the row names",
}
"""Tests, by a part of their name, whose rows leave out what decides time and memory."""


def golden(row: Row) -> TrainingRun:
    """A functional test of Megatron-LM (its golden values); tiny models on one node."""
    case = text(row, "case")
    untold = [reason for part, reason in _UNTOLD.items() if part in case]
    if untold:
        raise Unpredictable(untold[0])
    tp, pp, cp, ep = (integer(row, column, 1) for column in ("tp", "pp", "cp", "ep"))
    expert_tp = integer(row, "etp", tp)
    devices = smallest_world(_golden_devices(row), tp * pp * cp, pp * expert_tp * ep)
    dp = devices // (tp * pp * cp)
    micro_batch = integer(row, "micro_batch_size")
    global_batch = integer(row, "global_batch_size")
    model = _golden_model(row, tp)
    layout = _layout(case, model.layers, pp)
    chunks = len(layout) // pp if layout else _virtual_stages(row, model.layers, pp)
    return TrainingRun(
        model=model,
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, expert_tp=expert_tp,
            virtual_stages=chunks,
            layers_per_chunk=layout,
            zero_stage=3 if flag(row, "fsdp") else 1 if flag(row, "dist_optimizer") else 0,
            zero_degree=max(1, dp * cp // 2) if "multi_dist_optimizer_instances" in case else 0,
            sequence_parallel=flag(row, "sequence_parallel") and tp > 1,
            recompute=_recompute(text(row, "recompute_granularity", "none")),
            recompute_modules=_EXPERT_RECOMPUTE if "ep4_etp1" in case else ("core_attn",),
            schedule="interleaved" if chunks > 1 else "1f1b",
            micro_batch=micro_batch,
            micro_batches=whole(global_batch, micro_batch * dp, "global batch"),
        ),
        stack=_golden_stack(row),
        cluster=cluster_of(_golden_node(text(row, "gpu")), devices),
        optimizer=_golden_optimizer(case),
    )  # fmt: skip


def _golden_devices(row: Row) -> int:
    """The columns say 8 GPUs a node for GB200 too, where a node ("_1node") is a tray of 4."""
    known = [devices for part, devices in _RELEASE_GPUS.items() if part in text(row, "case")]
    if known:
        return known[0]
    if "GB200" in text(row, "gpu") and text(row, "case").endswith("_1node"):
        return 4
    return integer(row, "nodes", 1) * integer(row, "gpus_per_node", 8)


def _golden_node(gpu: str) -> str:
    """ "A100 (draco oci)" and "DGX H100 (DGX Cloud)" without their remarks."""
    return re.sub(r"\s*\(.*?\)", "", gpu)


def _golden_model(row: Row, tp: int) -> ModelShape:
    hidden, heads = integer(row, "hidden_size"), integer(row, "num_attention_heads")
    family, case, pattern = text(row, "family"), text(row, "case"), text(row, "hybrid_pattern")
    gated = flag(row, "swiglu")
    # two thirds as wide with a gate, in whole 64s (megatron/training/arguments.py: validate_args)
    ffn = integer(row, "ffn_hidden_size", 4 * hidden * 2 // 3 // 64 * 64 if gated else 4 * hidden)
    release = (hidden >= _LARGE and _OWN_RECIPE not in case) or (gated and bool(text(row, "ffn_hidden_size")))
    tokenizer = text(row, "vocab_file_or_tok", "GPT2BPE(default)")
    vocab = _BERT_CASED_VOCAB if family == "bert" else _VOCABULARIES.get(tokenizer, _VOCABULARIES["GPT2BPE(default)"])
    if tokenizer == "NullTokenizer" and hidden < _LARGE:
        vocab = _NULL_TOKENIZER_SMALL
    if tokenizer == "NullTokenizer" and not release and hidden < _LARGE:
        vocab = _VOCABULARIES["GPT2BPE(default)"]  # the small tests keep GPT-2's size with it
    if family in ("mimo", "multimodal-llava"):
        raise Unpredictable(f"sizes of the vision encoder of {case or family} are not in the row")
    return ModelShape(
        family=_golden_family(family, release and gated, pattern),
        hidden=hidden,
        ffn=ffn,
        layers=_golden_layers(row, family, hidden, pattern),
        heads=heads,
        kv_heads=integer(row, "num_query_groups", heads),
        vocab=padded_vocab(vocab, tp, integer(row, "make_vocab_div", 128)),
        seq_len=integer(row, "seq_length"),
        tied_embeddings=not flag(row, "untie"),
        dropout=not release,
        gated=gated,
        biases=not (release or integer(row, "num_experts", 0) or "disable_bias" in case),
        decoder_seq_len=integer(row, "decoder_seq_length", 0),
        extra_predictions=_extra_predictions(case, pattern),
        experts=_golden_experts(row, ffn, case),
        latent=_golden_latent(case),
        state_space=_golden_state_space(hidden) if pattern else None,
        pattern=_letters(pattern),
    )


def _extra_predictions(case: str, pattern: str) -> int:
    """--mtp-num-layers; the sections of a hybrid pattern behind its first slash."""
    if pattern:
        return pattern.count("/")
    return int(any(part in case for part in ("ep4_etp1", "scoped_cudagraph")) and "no_mtp" not in case)


def _golden_family(family: str, gated: bool, pattern: str) -> Family:
    if pattern:
        return "hybrid"
    if family == "bert":
        return "bert"
    if family == "t5":
        return "t5"
    if gated and family in ("moe", "mixtral"):
        return "moe"
    return "llama" if gated else "gpt"


def _golden_optimizer(case: str) -> str:
    """--optimizer: muon, or dist_muon over whole layers, but where a layout of parameters cuts them evenly."""
    if "muon" not in case:
        return "AdamW"
    return "Muon by layers" if "_dist_dist_muon" in case and "param_layout" not in case else "Muon"


def _layout(case: str, layers: int, pp: int) -> tuple[int, ...]:
    """Layers of every model chunk, where a test has its own."""
    if pp == 1:
        return ()
    found = (sizes for part, sizes in _LAYOUTS.items() if part in case)
    return next((sizes for sizes in found if sum(sizes) == layers and len(sizes) % pp == 0), ())


def _golden_layers(row: Row, family: str, hidden: int, pattern: str) -> int:
    if pattern:
        return len(_letters(pattern))
    if family == "t5":
        return integer(row, "num_layers", 12 if hidden == _SMALL_T5 else 24)
    return integer(row, "num_layers")


def _letters(pattern: str) -> str:
    """Layers of a hybrid pattern without its stage marks; what follows a slash are extra predictions."""
    return re.sub(r"[^M*\-E]", "", pattern.split("/")[0])


def _golden_latent(case: str) -> LatentAttention | None:
    known = {"deepseek_proxy": _PROXY_LATENT, "ep4_etp1": _TEST_LATENT, "_mla": _SMALL_LATENT}
    return next((latent for part, latent in known.items() if part in case), None)


def _golden_experts(row: Row, ffn: int, case: str) -> Experts | None:
    count = integer(row, "num_experts", 0)
    if not count:
        return None
    proxy = "deepseek_proxy" in case or "ep4_etp1" in case
    return Experts(
        count=count,
        per_token=integer(row, "moe_topk", 2),
        hidden=_EXPERT_WIDTH if proxy or "gpt3_moe_mcore" in case else ffn,
        shared_hidden=_EXPERT_WIDTH if proxy else 512 if "ep2_etp2_pp2" in case and "gpt3_moe_mcore" in case else 0,
        dense_layers=3 if proxy else 0,
        wide_router=proxy,  # --moe-router-dtype fp32
    )


def _golden_state_space(hidden: int) -> StateSpace:
    """Megatron's defaults: twice the width in heads of 64, a state of 128 (--mamba-head-dim, --mamba-state-dim); of a
    width whose heads eight groups would not share, Nemotron 3 Nano's 64 heads (`model_shapes.json`)."""
    heads = 2 * hidden // 64
    return StateSpace(heads=heads if heads % 8 == 0 else 64, head_dim=64, state=128)


def _virtual_stages(row: Row, layers: int, pp: int) -> int:
    """Model chunks per device; a pattern marks its chunks by "|"."""
    marks = text(row, "hybrid_pattern").split("/")[0].count("|")
    if marks:
        return max(1, (marks + 1) // pp)
    per_stage = integer(row, "vpp_layers_per_stage", 0)
    if per_stage and pp > 1:
        return max(1, layers // (pp * per_stage))
    return integer(row, "vpp", 1) if pp > 1 else 1


def _recompute(name: str) -> Recompute:
    modes: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "full"}
    if name not in modes:
        raise Unpredictable(f"recomputation {name!r} is none of {', '.join(modes)}")
    return modes[name]


def _golden_stack(row: Row) -> Stack:
    kind = {"fp16": stacks.MEGATRON_FP16, "fp32": stacks.MEGATRON_FP32}.get(text(row, "dtype"), stacks.MEGATRON)
    stack = replace(
        kind,
        name="megatron-tests",
        attention=_golden_attention(row),
        own_layers=_has_own_layers(row),
        loads_masks="no_create_attention_mask" not in text(row, "case"),
        user_buffers="tp_overlap" in text(row, "case"),
        fixed_workspaces=_fixes_workspaces(row),
        compiled_loss_copies=_compiled_copies(row),
        overlap_gradients=flag(row, "overlap_grad_reduce"),
        overlap_parameters=flag(row, "overlap_param_gather"),
        cuda_graph="layers" if text(row, "cuda_graph") else "none",
        deterministic=flag(row, "deterministic"),
        offload_activations="offloading" in text(row, "case"),
        overlap_exchanges="offloading" in text(row, "case") and "no_a2a_ovlp" not in text(row, "case"),
        layer_masks=_keeps_layer_masks(row),
        keeps_transposes="H100" in text(row, "gpu"),
        compiled_loss="cross_entropy_loss_fusion" in text(row, "case"),
        expandable_segments="deepseek_proxy" in text(row, "case"),
        deferred_head_gradients=_DEFERRAL_LIMIT if "defer_embedding_wgrad" in text(row, "case") else 0,
        grouped_experts=_golden_groups_experts(text(row, "case")),
        gathered_experts=_golden_gathers_experts(text(row, "case"), text(row, "family")),
    )
    return replace(stack, dtype="float8", scaling="tensor") if text(row, "fp8") else stack


def _has_own_layers(row: Row) -> bool:
    """--transformer-impl local; tests of BERT say it by their name."""
    return text(row, "transformer_impl") == "local" or "local_spec" in text(row, "case")


def _keeps_layer_masks(row: Row) -> bool:
    """BERT through Transformer Engine, but for the older engine of the long-term container (hw_tag "lts_...")."""
    return text(row, "family") == "bert" and not _has_own_layers(row) and not text(row, "hw_tag").startswith("lts")


def _fixes_workspaces(row: Row) -> bool:
    """Tests that fix NCCL's algorithm fix the workspaces of cuBLAS too. Values of context parallelism on GB200 are
    those of fixed ones too, but those of newer tests that say "nondeterministic"."""
    gpu, case = text(row, "gpu"), text(row, "case")
    is_newer = "nondeterministic" in case and any(part in case for part in ("_1node", "_resume_", "_etp"))
    is_fixed = "cp2" in case and not is_newer and any(part in gpu for part in _BLACKWELL)
    return bool(text(row, "nccl_algo")) or flag(row, "deterministic") or is_fixed


def _compiled_copies(row: Row) -> int:
    """Values for A100 stem from older containers, whose torch copied what a compiled kernel updates in place while it
    measured variants of it: the 16-bit logits in "dev", float32 ones too in the long-term one of the draco cluster."""
    gpu, is_long_term = text(row, "gpu"), text(row, "hw_tag").startswith("lts")
    if "A100" not in gpu or (is_long_term and "draco" not in gpu):
        return 0
    return 6 if is_long_term else 2


def _golden_groups_experts(case: str) -> bool:
    """--moe-grouped-gemm: all tests but some of those named after "4experts" or "8experts" have it."""
    return "experts" not in case or any(part in case for part in _GROUPED)


def _golden_gathers_experts(case: str, family: str) -> bool:
    """--moe-token-dispatcher-type: its default "allgather", but "alltoall" in tests with tensor parallelism of
    experts, in proxies of DeepSeek and in Mixtral's."""
    return family == "moe" and not any(part in case for part in _EXCHANGED)


def _golden_attention(row: Row) -> Literal["flash", "fused", "unfused"]:
    """--attention-backend; "auto" is what Transformer Engine picks, or unfused without that engine.

    It picks cuDNN's fused kernel on H100 and flash attention elsewhere; the older engine of the draco cluster and of
    the long-term container (hw_tag "lts_...") has no deterministic flash attention and falls back to unfused.
    Values of tests without experts for that container are mostly of a newer one: of the peaks in dev that tell, 11 of
    15 are flash attention's.
    """
    backend, local = text(row, "attention_backend"), text(row, "transformer_impl") == "local"
    if backend in ("unfused", "local") or (local and not backend):
        return "unfused"
    gpu = text(row, "gpu")
    if backend or not flag(row, "deterministic"):
        return "fused" if backend == "fused" or (not backend and "H100" in gpu) else "flash"
    is_old = "draco" in gpu or (text(row, "hw_tag").startswith("lts") and integer(row, "num_experts", 0) > 0)
    return "unfused" if is_old else "fused" if "H100" in gpu else "flash"


_KORTHIKANTI_MODES: dict[str, tuple[bool, Recompute]] = {
    "none": (False, "none"),
    "any": (False, "none"),
    "seqpar": (True, "none"),
    "selective": (False, "selective"),
    "seqpar+selective": (True, "selective"),
    "full": (False, "full"),
}
"""(sequence parallel, recomputation) by the column recompute_mode."""


def korthikanti(row: Row) -> TrainingRun:
    """Korthikanti et al. 2022 on Selene (A100-80, 8 HDR links a node); GPT with a vocabulary of 51,200."""
    mode = text(row, "recompute_mode", "none")
    if mode not in _KORTHIKANTI_MODES:
        raise Unpredictable(f"recompute mode {mode!r} is none of {', '.join(_KORTHIKANTI_MODES)}")
    sequence_parallel, recompute = _KORTHIKANTI_MODES[mode]
    tp, pp, dp = (integer(row, column) for column in ("tp", "pp", "dp"))
    heads, micro_batch, chunks = (
        integer(row, "heads"),
        integer(row, "micro_batch"),
        integer(row, "interleave_chunks", 1),
    )
    return TrainingRun(
        model=ModelShape(
            family="gpt", hidden=integer(row, "hidden"), ffn=integer(row, "ffn"), layers=integer(row, "layers"),
            heads=heads, kv_heads=heads, vocab=padded_vocab(51200, tp), seq_len=integer(row, "seq_len"),
            tied_embeddings=True, dropout=True,
        ),
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, virtual_stages=chunks, sequence_parallel=sequence_parallel, recompute=recompute,
            schedule="interleaved" if chunks > 1 else "1f1b", micro_batch=micro_batch,
            micro_batches=whole(integer(row, "global_batch"), micro_batch * dp, "global batch"),
        ),
        stack=stacks.MEGATRON_2022,
        cluster=cluster_of("DGX-A100", tp * pp * dp),
    )  # fmt: skip


def simumax(row: Row) -> TrainingRun:
    """SimuMax's runs on B200: Megatron, Transformer Engine, distributed optimizer; "cef" is a fused cross entropy."""
    tp, pp, dp, cp, ep = (integer(row, column, 1) for column in ("tp", "pp", "dp", "cp", "ep"))
    model = model_named(text(row, "model"), integer(row, "seq_len"))
    return TrainingRun(
        model=replace(model, layers=integer(row, "layers"), extra_predictions=0),
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, expert_tp=1, zero_stage=1, sequence_parallel=tp > 1,
            micro_batch=integer(row, "micro_batch_seqs", 1), micro_batches=integer(row, "microbatches"),
        ),
        stack=replace(stacks.MEGATRON, fused_loss="cef" in text(row, "case")),
        cluster=cluster_of(text(row, "gpu"), integer(row, "n_gpus")),
    )  # fmt: skip
