"""What the columns of every kind of measurement file mean: recognised by, read, measured, never read.

A file is recognised by its columns, never by its name. The models of `predict` see `inputs` and nothing else, so that
neither a measurement nor another simulator's prediction can leak into ours:

    schema = recognise(["n_gpus", "hidden", ..., "iter_time_ms"])       # e2e_vtrain_a100_single
    schema.inputs_of(row)                                                # the row without iter_time_ms
    schema.measured["step"]                                              # {"iter_time_ms": "ms"}

Files with both time and memory belong to the kinds step and memory; `--kind` says which columns are asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from autopar.errors import ConfigurationError

Kind: TypeAlias = Literal["op", "collective", "memory", "oom", "step", "pipeline", "attention"]
KINDS: tuple[Kind, ...] = get_args(Kind)

Tier: TypeAlias = Literal["t0", "t1", "physics"]
"""t0: hardware presets and physics with constants fitted across devices; t1: constants of that device type too;
physics: the ablation, no fitted constant at all."""
TIERS: tuple[Tier, ...] = ("t0", "t1", "physics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The prediction of one row: a value for each measured column, or the reason why there is none."""

    values: Mapping[str, float | str] = field(default_factory=dict)
    """By measured column, in that column's unit; a column may be absent where only it cannot be predicted."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of one kind of file."""

    name: str
    """Of the published collection, as "op_vidur_linear"."""
    recognised_by: tuple[str, ...]
    """Columns that a file of this kind must have; all are inputs."""
    measured: Mapping[Kind, Mapping[str, str]]
    """By kind: measured column -> unit; a row is scored by the first column that it has. Where one column holds several
    quantities the unit is "by row"."""
    also_read: tuple[str, ...] = ()
    """Inputs that a file may lack, or that others have too."""
    never_read: Mapping[str, str] = field(default_factory=dict)
    """Column -> why nobody reads it."""
    groups: tuple[str, ...] = ()
    """Columns that name the group of a row: errors inside a group are not independent, the bootstrap draws groups."""
    ranked_within: tuple[str, ...] = ()
    """Columns that name the rows whose plans compete with each other; empty where the file holds no ranking."""
    folder: str = "dev"
    """Where the collection keeps the file."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every column that a prediction may read."""
        return self.recognised_by + self.also_read

    @property
    def columns(self) -> frozenset[str]:
        """Every column that this kind of file may have."""
        measured = {column for columns in self.measured.values() for column in columns}
        return frozenset(self.inputs) | measured | set(self.never_read)

    def inputs_of(self, row: Mapping[str, str]) -> dict[str, str]:
        """The part of a row that a prediction may read; a column that the file lacks is empty."""
        return {column: (row.get(column) or "").strip() for column in self.inputs}


_SOURCE = "where it was published"
_OTHERS = "another simulator's prediction"
_VTRAIN = ("n_gpus", "global_batch_seqs", "micro_batch_seqs", "hidden", "heads", "layers", "seq_len", "tp", "dp", "pp")

SCHEMAS: tuple[Schema, ...] = (
    Schema(
        name="op_vidur_linear",
        recognised_by=("gpu", "model", "op", "num_tokens", "tp", "hidden", "ffn"),
        also_read=("heads", "kv_heads", "vocab", "gated_mlp"),
        measured={"op": {"time_ms_median": "ms"}},
        groups=("gpu", "model", "op"),
    ),
    Schema(
        name="op_neusight_kernels",
        recognised_by=("gpu", "op", "B", "M", "N", "K", "H"),
        also_read=("torch",),
        measured={"op": {"latency_ms": "ms"}},
        never_read={"kernel": "known only after the measurement"},
        groups=("gpu", "op"),
    ),
    Schema(
        name="op_simumax",
        recognised_by=("gpu", "op", "shape", "peak_tflops_ref"),
        measured={"op": {"efficiency": "fraction of peak_tflops_ref"}},
        groups=("gpu", "op"),
    ),
    Schema(
        name="op_llmcompass",
        recognised_by=("gpu", "op", "M", "K", "N", "unit"),
        measured={"op": {"value": "by row"}},
        groups=("gpu", "op"),
    ),
    Schema(
        name="op_deepgemm_h800_fp8",
        recognised_by=("kind", "groups", "M", "N", "K"),
        measured={"op": {"tflops": "TFLOP/s", "mem_GBps": "GB/s"}},
        groups=("kind", "N", "K"),
    ),
    Schema(
        name="op_galvatron_llama2_7b_fwd",
        recognised_by=("kind", "layers", "layer_type", "batch", "seq"),
        measured={"op": {"time_ms": "ms"}},
        groups=("kind", "layers", "layer_type"),
    ),
    Schema(
        name="coll_nccl_tests",
        recognised_by=("hw", "collective", "n_ranks", "n_nodes", "msg_bytes"),
        measured={
            "collective": {
                "time_us": "us",
                "busbw_GBps": "GB/s",
                "algbw_GBps": "GB/s",
                "time_us_inplace": "us",
                "busbw_inplace_GBps": "GB/s",
            }
        },
        never_read={"src": _SOURCE},
        groups=("hw", "collective", "n_ranks"),
    ),
    Schema(
        name="coll_nnscaler_mi250",
        recognised_by=("hw", "n_ranks", "n_nodes", "collective", "size_mb"),
        measured={"collective": {"time_us": "us"}},
        groups=("hw", "collective", "n_ranks"),
    ),
    Schema(
        name="coll_vidur_network",
        recognised_by=("hw", "collective", "n_ranks", "devices_per_node", "msg_bytes"),
        measured={"collective": {"time_ms_median_over_ranks": "ms", "time_ms_max_over_ranks": "ms"}},
        never_read={"n_ranks_reported": "how many ranks' logs were found"},
        groups=("hw", "collective", "n_ranks", "devices_per_node"),
    ),
    Schema(
        name="coll_deepep",
        recognised_by=("lib", "hw", "ep", "op", "tokens_per_rank", "hidden", "topk"),
        also_read=("bottleneck",),
        measured={"collective": {"bottleneck_GBps": "GB/s", "latency_us": "us"}},
        groups=("lib", "hw", "ep"),
    ),
    Schema(
        name="coll_galvatron_bandwidth_summary",
        recognised_by=("metric", "group_size", "consecutive", "nodes", "gpus_per_node"),
        measured={"collective": {"value": "by row"}},
        never_read={"file": _SOURCE},
        groups=("metric", "nodes", "group_size"),
    ),
    Schema(
        name="coll_simumax_fits",
        recognised_by=("system", "network", "link_gbps", "link_latency_us", "op"),
        measured={"collective": {"fitted_efficiency": "fraction of link_gbps", "fitted_latency_us": "us"}},
        groups=("system", "network"),
    ),
    Schema(
        name="e2e_vtrain_a100_multi",
        recognised_by=("params_b", *_VTRAIN),
        measured={"step": {"iter_time_ms": "ms"}},
        groups=("hidden", "layers", "n_gpus"),
        ranked_within=("hidden", "heads", "layers", "seq_len", "n_gpus", "global_batch_seqs"),
    ),
    Schema(
        name="e2e_vtrain_a100_single",
        recognised_by=_VTRAIN,
        measured={"step": {"iter_time_ms": "ms"}},
        groups=("hidden", "layers", "n_gpus"),
        ranked_within=("hidden", "heads", "layers", "seq_len", "n_gpus", "global_batch_seqs"),
    ),
    Schema(
        name="e2e_llmfoundry_fsdp",
        recognised_by=("model", "gpu", "n_gpus", "seq_len", "micro_batch_seqs", "grad_accum", "mp_mode", "sharding"),
        also_read=("section", "global_batch_seqs", "precision", "act_ckpt", "act_offload", "n_params"),
        measured={
            "step": {
                "tokens_per_s_per_gpu": "tokens/s/GPU", "tokens_per_s": "tokens/s", "mfu_pct": "%", "hfu_pct": "%",
            }
        },
        groups=("model", "gpu", "precision"),
    ),
    Schema(
        name="e2e_megatron_bridge",
        recognised_by=("task", "model", "system", "n_gpus", "precision", "gbs", "mbs", "seq_len", "vp", "ga"),
        also_read=("container", "fsdp", "tp", "pp", "cp", "ep"),
        measured={"step": {"tokens_per_s_per_gpu": "tokens/s/GPU", "model_tflops_per_gpu": "TFLOP/s/GPU"}},
        never_read={"src": _SOURCE},
        groups=("model", "system"),
    ),
    Schema(
        name="e2e_neusight_small",
        recognised_by=("gpu", "model", "mode", "seq_len", "batch", "parallel", "degree", "pp_microbatches"),
        also_read=("fusion",),
        measured={"step": {"e2e_ms": "ms", "fw_ms": "ms", "bw_ms": "ms"}},
        groups=("gpu", "model"),
    ),
    Schema(
        name="e2e_mem_megatron_golden",
        recognised_by=(
            "gpu", "num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size",
            "global_batch_size", "tp", "pp", "nodes", "gpus_per_node",
        ),
        also_read=(
            "hw_tag", "case", "family", "ffn_hidden_size", "num_query_groups", "decoder_seq_length",
            "vpp_layers_per_stage", "vpp", "cp", "ep", "etp", "num_experts", "moe_topk", "sequence_parallel",
            "dist_optimizer", "overlap_grad_reduce", "overlap_param_gather", "fsdp", "recompute_granularity",
            "recompute_method", "recompute_num_layers", "transformer_impl", "attention_backend", "dtype", "fp8",
            "swiglu", "untie", "deterministic", "hybrid_pattern", "cuda_graph", "vocab_file_or_tok", "make_vocab_div",
            "nccl_algo",
        ),
        measured={
            "memory": {"mem_max_allocated_bytes": "B", "mem_allocated_bytes_last": "B"},
            "step": {"iter_time_median_s": "s", "iter_time_p10_s": "s", "iter_time_p90_s": "s"},
        },
        never_read={
            "n_steady_iters": "of the measurement, not of the run", "src_path": _SOURCE,
        },
        groups=("case",),
    ),
    Schema(
        name="e2e_mem_simumax_b200",
        recognised_by=("model", "layers", "gpu", "n_gpus", "tp", "pp", "dp", "cp", "ep", "seq_len", "microbatches"),
        also_read=("case", "micro_batch_seqs"),
        measured={"memory": {"peak_alloc_gib": "GiB"}, "step": {"step_time_ms": "ms"}},
        never_read={"simumax_pred_ms": _OTHERS, "simumax_pred_gib": _OTHERS},
        groups=("model", "tp", "pp", "cp", "ep"),
        ranked_within=("model", "layers", "gpu", "n_gpus", "seq_len", "microbatches"),
    ),
    Schema(
        name="e2e_mem_torchtitan",
        recognised_by=("model", "n_gpus", "technique", "seq_len", "local_batch_seqs", "act_ckpt", "fsdp", "precision"),
        also_read=("global_batch_seqs", "tp", "pp", "cp", "schedule", "torch_compile", "hw"),
        measured={"memory": {"peak_mem_gib_max_rank": "GiB"}, "step": {"tokens_per_s_per_gpu": "tokens/s/GPU"}},
        never_read={"table": _SOURCE, "src": _SOURCE},
        groups=("model", "n_gpus", "hw"),
    ),
    Schema(
        name="e2e_mem_korthikanti_a100",
        recognised_by=("model", "hidden", "ffn", "heads", "layers", "tp", "pp", "dp", "quantity", "recompute_mode"),
        also_read=("seq_len", "n_gpus", "global_batch", "micro_batch", "interleave_chunks", "unit"),
        measured={"memory": {"value": "by row"}, "step": {"value": "by row"}},
        groups=("model",),
    ),
    Schema(
        name="e2e_mem_colossalai",
        recognised_by=("gpu", "n_gpus", "model", "parallelism", "batch_per_dp", "seq_len"),
        measured={
            "memory": {"peak_mem_mib": "MiB"},
            "step": {"samples_per_s": "samples/s", "tflops_per_gpu": "TFLOP/s/GPU"},
        },
        never_read={"caution": "a remark on the source", "src": _SOURCE},
        groups=("model", "gpu"),
    ),
    Schema(
        name="mem_galvatron_llama2_7b",
        recognised_by=("strategy_pp_tp_dp", "layers", "global_bsz", "seq", "rank", "quantity"),
        measured={"memory": {"value_mb": "MB"}},
        groups=("strategy_pp_tp_dp",),
    ),
    Schema(
        name="oom_bmtrain_v100",
        recognised_by=("hw", "model", "strategy", "batch_size_per_gpu"),
        measured={"oom": {"outcome": "fits or OOM"}, "step": {"samples_per_gpu_per_s": "samples/s/GPU"}},
        never_read={"src": _SOURCE},
        groups=("model", "strategy"),
    ),
    Schema(
        name="oom_megatron_bridge",
        recognised_by=("study", "hw", "n_gpus", "config", "varied"),
        measured={
            "oom": {"outcome": "fits or OOM"},
            "memory": {"peak_mem_gb": "GB"},
            "step": {"step_ms": "ms", "tflops_per_gpu": "TFLOP/s/GPU"},
        },
        never_read={"src": _SOURCE},
        groups=("study",),
    ),
    Schema(
        name="pipe_zero_bubble_a100",
        recognised_by=("pp_stages", "microbatches", "T_F_us", "T_B_us", "T_W_us", "T_comm_us", "schedule"),
        also_read=("model", "n_gpus", "micro_batch_seqs", "seq_len", "hidden", "heads", "layers_actual"),
        measured={
            "pipeline": {
                "bubble_rate_paper_tab5": "fraction",
                "samples_per_gpu_per_s_tab4": "samples/s/GPU",
                "peak_mem_gb_tab4": "GB",
            }
        },
        groups=("model",),
    ),
    Schema(
        name="usp_ulysses_ring_8xa100",
        recognised_by=("group_num", "batch", "seq_len", "heads", "head_dim", "ulysses_degree"),
        measured={"attention": {"zigzag_nopack": "calls/s"}},
        never_read={
            **dict.fromkeys(("basic_nopack", "basic_qkvpack"), "rings without a balanced order: never chosen"),
            **dict.fromkeys(("stripe_nopack", "stripe_qkvpack"), "an order that there is not"),
            "zigzag_qkvpack": "queries, keys and values in one tensor",
            "from_memory": "how the picture was read",
        },
        groups=("group_num", "heads", "head_dim", "seq_len"),
        ranked_within=("group_num", "batch", "seq_len", "heads", "head_dim"),
        folder="published",
    ),
)  # fmt: skip


def schema_named(name: str) -> Schema:
    """The schema of exactly this name."""
    return next(schema for schema in SCHEMAS if schema.name == name)


def recognise(columns: Sequence[str], kind: Kind | None = None) -> Schema:
    """The schema of a file with these columns; with `kind`, one that has measurements of that kind.

    Of several, that which knows most of the columns, then that which expects fewest others. Raises
    ConfigurationError where none fits, with the nearest kind of file and the columns that it misses.
    """
    present = frozenset(columns)
    fitting = [schema for schema in SCHEMAS if present.issuperset(schema.recognised_by)]
    if not fitting:
        raise ConfigurationError(_unknown_columns(columns))
    best = max(fitting, key=lambda schema: (len(schema.columns & present), -len(schema.columns - present)))
    if kind is not None and kind not in best.measured:
        raise ConfigurationError(
            f"columns of {best.name} hold no measurement of kind {kind!r}; its kinds: {', '.join(best.measured)}"
        )
    return best


def _unknown_columns(columns: Iterable[str]) -> str:
    present = frozenset(columns)
    nearest = min(SCHEMAS, key=lambda schema: len(set(schema.recognised_by) - present) / len(schema.recognised_by))
    missing = [column for column in nearest.recognised_by if column not in present]
    hints = [
        f"{column} (you have {close[0]})" if close else column
        for column in missing
        for close in [difflib.get_close_matches(column, sorted(present), n=1)]
    ]
    return (
        f"these columns are of no known kind of file: {', '.join(sorted(present)) or 'none'}; "
        f"nearest is {nearest.name}, which also needs {', '.join(hints)}"
    )
