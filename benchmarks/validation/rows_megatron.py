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
_RAMP_UP_BATCH = 384
"""First global batch of the 15B release tests (--rampup-batch-size "[384 384 97656250]")."""
_PROXY_LATENT = LatentAttention(query_rank=256, key_value_rank=128, nope_head=128, rope_head=64, value_head=128)
"""Of the test deepseek_proxy_fsdp_*, with 3 dense layers and shared experts of 1024."""
_SMALL_LATENT = LatentAttention(query_rank=192, key_value_rank=64, nope_head=16, rope_head=8, value_head=16)
"""Of the test gpt3_*_mla."""


def golden(row: Row) -> TrainingRun:
    """A functional test of Megatron-LM (its golden values); tiny models on one node."""
    tp, pp, cp, ep = (integer(row, column, 1) for column in ("tp", "pp", "cp", "ep"))
    expert_tp = integer(row, "etp", tp)
    devices = smallest_world(
        integer(row, "nodes", 1) * integer(row, "gpus_per_node", 8), tp * pp * cp, pp * expert_tp * ep
    )
    dp = devices // (tp * pp * cp)
    micro_batch = integer(row, "micro_batch_size")
    global_batch = integer(row, "global_batch_size", _RAMP_UP_BATCH if "15b" in text(row, "case") else None)
    model = _golden_model(row, tp)
    return TrainingRun(
        model=model,
        parallel=ParallelShape(
            tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, expert_tp=expert_tp,
            virtual_stages=_virtual_stages(row, model.layers, pp),
            zero_stage=3 if flag(row, "fsdp") else 1 if flag(row, "dist_optimizer") else 0,
            sequence_parallel=flag(row, "sequence_parallel") and tp > 1,
            recompute=_recompute(text(row, "recompute_granularity", "none")),
            schedule="interleaved" if _virtual_stages(row, model.layers, pp) > 1 else "1f1b",
            micro_batch=micro_batch,
            micro_batches=whole(global_batch, micro_batch * dp, "global batch"),
        ),
        stack=_golden_stack(row),
        cluster=cluster_of(_golden_node(text(row, "gpu")), devices),
        optimizer="Muon" if "muon" in text(row, "case") else "AdamW",
    )  # fmt: skip


def _golden_node(gpu: str) -> str:
    """ "A100 (draco oci)" and "DGX H100 (DGX Cloud)" without their remarks."""
    return re.sub(r"\s*\(.*?\)", "", gpu)


def _golden_model(row: Row, tp: int) -> ModelShape:
    hidden, heads = integer(row, "hidden_size"), integer(row, "num_attention_heads")
    family, case, pattern = text(row, "family"), text(row, "case"), text(row, "hybrid_pattern")
    gated = flag(row, "swiglu")
    ffn = integer(row, "ffn_hidden_size", 4 * hidden)
    release = hidden >= 2048 or gated
    tokenizer = text(row, "vocab_file_or_tok", "GPT2BPE(default)")
    vocab = _BERT_CASED_VOCAB if family == "bert" else _VOCABULARIES.get(tokenizer, _VOCABULARIES["GPT2BPE(default)"])
    if family in ("mimo", "multimodal-llava"):
        raise Unpredictable(f"sizes of the vision encoder of {case or family} are not in the row")
    return ModelShape(
        family=_golden_family(family, gated, pattern),
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
        extra_predictions=0 if "no_mtp" in case else 1 if "fine_grained_offloading" in case else 0,
        experts=_golden_experts(row, ffn, case),
        latent=_PROXY_LATENT if "deepseek_proxy" in case else _SMALL_LATENT if "_mla" in case else None,
        state_space=_golden_state_space(hidden) if pattern else None,
        pattern=_letters(pattern),
    )


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


def _golden_layers(row: Row, family: str, hidden: int, pattern: str) -> int:
    if pattern:
        return len(_letters(pattern))
    if family == "t5":
        return integer(row, "num_layers", 12 if hidden == _SMALL_T5 else 24)
    return integer(row, "num_layers")


def _letters(pattern: str) -> str:
    """Layers of a hybrid pattern without its stage marks; what follows a slash are extra predictions."""
    return re.sub(r"[^M*\-E]", "", pattern.split("/")[0])


def _golden_experts(row: Row, ffn: int, case: str) -> Experts | None:
    count = integer(row, "num_experts", 0)
    if not count:
        return None
    if "deepseek_proxy" in case:
        return Experts(
            count=count, per_token=integer(row, "moe_topk", 2), hidden=1024, shared_hidden=1024, dense_layers=3
        )
    return Experts(count=count, per_token=integer(row, "moe_topk", 2), hidden=ffn)


def _golden_state_space(hidden: int) -> StateSpace:
    """Megatron's defaults: twice the width in heads of 64, a state of 128 (--mamba-head-dim, --mamba-state-dim)."""
    return StateSpace(heads=2 * hidden // 64, head_dim=64, state=128)


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
        attention=_golden_attention(row),
        overlap_gradients=flag(row, "overlap_grad_reduce"),
        overlap_parameters=flag(row, "overlap_param_gather"),
        cuda_graph=bool(text(row, "cuda_graph")),
        deterministic=flag(row, "deterministic"),
        offload_activations="offloading" in text(row, "case"),
        compiled_loss="cross_entropy_loss_fusion" in text(row, "case"),
        expandable_segments="deepseek_proxy" in text(row, "case"),
    )
    return replace(stack, dtype="float8", scaling="tensor") if text(row, "fp8") else stack


def _golden_attention(row: Row) -> Literal["flash", "fused", "unfused"]:
    """--attention-backend; "auto" is what Transformer Engine picks, or unfused without that engine.

    It picks cuDNN's fused kernel on H100 and flash attention elsewhere; the older engine of the draco cluster has no
    deterministic flash attention and falls back to unfused.
    """
    backend, local = text(row, "attention_backend"), text(row, "transformer_impl") == "local"
    if backend in ("unfused", "local") or (local and not backend):
        return "unfused"
    if backend or not flag(row, "deterministic"):
        return "fused" if backend == "fused" else "flash"
    gpu = text(row, "gpu")
    return "unfused" if "draco" in gpu else "fused" if "H100" in gpu else "flash"


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
