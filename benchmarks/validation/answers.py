"""What files measure of a run, from its seconds or its bytes: iter_time_ms, tokens_per_s_per_gpu, value_mb, ...

    step_values(schema, row, run, seconds)       # {"iter_time_ms": 410.5}
    memory_values(schema, row, run, memory)      # {"peak_alloc_gib": 66.5}

`seconds` and `memory` are whatever predicts a run: the road through the planner's own cost models, or a naive formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from benchmarks.validation.counts import attention_flops, model_flops
from benchmarks.validation.fields import Row, Unpredictable, integer, text
from benchmarks.validation.runs import TrainingRun
from benchmarks.validation.schemas import Schema

GIB, MIB = 2**30, 2**20

FITS, OOM = "fits", "OOM"
"""Outcomes as files write them; a remark may follow, as in "OOM(fragmentation)"."""

H100_PEAK, A100_PEAK = 989e12, 312e12
"""FLOP/s that llm-foundry divides by for its MFU (scripts/train/benchmarking/README.md); float8 counts twice."""


class StageMemory(Protocol):
    """Bytes of one rank of a pipeline stage."""

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states."""

    @property
    def saved(self) -> float:
        """What forward of one micro-batch leaves for backward."""

    @property
    def block_states(self) -> float:
        """Of `states`, those of the layers: without embedding and head."""

    @property
    def block_saved(self) -> float:
        """Most that the layers keep for backward of all micro-batches in flight."""

    @property
    def between_steps(self) -> float:
        """memory_allocated after a step."""

    @property
    def peak(self) -> float:
        """max_memory_allocated."""

    @property
    def reserved(self) -> float:
        """max_memory_reserved."""


Values = Mapping[str, float]
Seconds = Callable[[TrainingRun], float]
Ranks = Callable[[TrainingRun], Sequence[StageMemory]]


def ran_out(outcome: str) -> bool:
    """Whether an outcome is an out-of-memory error."""
    return outcome.strip().upper().startswith(OOM)


def step_values(schema: Schema, row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    """What a file measures of a run's time, by column. Raises Unpredictable for a row that measures no time."""
    return _STEP_VALUES[schema.name](row, run, seconds)


def memory_values(schema: Schema, row: Row, run: TrainingRun, memory: Ranks) -> Values:
    """What a file measures of a run's memory, by column. Raises Unpredictable for a row that measures none."""
    return _MEMORY_VALUES[schema.name](row, run, memory)


def _iteration(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    return {"iter_time_ms": 1e3 * seconds(run)}


def _foundry(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    """MFU as the source counts it: 6 N tokens and 12 L d T^2 a sequence; HFU counts recomputed forwards too."""
    step, devices = seconds(run), run.cluster.num_devices
    sequences, tokens = run.parallel.global_batch, run.parallel.global_batch * run.model.seq_len
    flops = 6.0 * integer(row, "n_params") * tokens + 3 * sequences * attention_flops(run.model)
    peak = (H100_PEAK if "h100" in text(row, "gpu") else A100_PEAK) * (2 if run.stack.dtype == "float8" else 1)
    utilisation = 100 * flops / (step * devices * peak)
    return {
        "tokens_per_s_per_gpu": tokens / step / devices,
        "tokens_per_s": tokens / step,
        "mfu_pct": utilisation,
        "hfu_pct": utilisation * (4 / 3 if run.parallel.recompute == "full" else 1),
    }


def _throughput(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    step, devices = seconds(run), run.cluster.num_devices
    return {
        "tokens_per_s_per_gpu": run.parallel.global_batch * run.model.seq_len / step / devices,
        "model_tflops_per_gpu": model_flops(run) / step / devices / 1e12,
    }


def _passes(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    """NeuSight measures forward and backward apart; several devices only together."""
    whole = seconds(run)
    forward = seconds(replace(run, training=False)) if run.training else whole
    return {"e2e_ms": 1e3 * whole, "fw_ms": 1e3 * forward, "bw_ms": 1e3 * (whole - forward)}


def _golden(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    """One value for the median and both deciles: a model of one step knows no spread."""
    step = seconds(run)
    return {"iter_time_median_s": step, "iter_time_p10_s": step, "iter_time_p90_s": step}


def _simumax(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    return {"step_time_ms": 1e3 * seconds(run)}


def _korthikanti(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    if text(row, "quantity") != "iteration_time":
        raise Unpredictable(f"{text(row, 'quantity')} is of kind memory")
    return {"value": seconds(run)}


def _colossal(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    step = seconds(run)
    return {
        "samples_per_s": run.parallel.global_batch / step,
        "tflops_per_gpu": model_flops(run) / step / run.cluster.num_devices / 1e12,
    }


def _bmtrain(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    """The source says per GPU, but 24 samples/s of a 13B model would be 965 TFLOP/s on a V100: all GPUs together."""
    return {"samples_per_gpu_per_s": run.parallel.global_batch / seconds(run)}


def _bridge_study(row: Row, run: TrainingRun, seconds: Seconds) -> Values:
    step = seconds(run)
    return {"step_ms": 1e3 * step, "tflops_per_gpu": model_flops(run) / step / run.cluster.num_devices / 1e12}


_STEP_VALUES: Mapping[str, Callable[[Row, TrainingRun, Seconds], Values]] = {
    "e2e_vtrain_a100_multi": _iteration,
    "e2e_vtrain_a100_single": _iteration,
    "e2e_llmfoundry_fsdp": _foundry,
    "e2e_megatron_bridge": _throughput,
    "e2e_neusight_small": _passes,
    "e2e_mem_megatron_golden": _golden,
    "e2e_mem_simumax_b200": _simumax,
    "e2e_mem_torchtitan": _throughput,
    "e2e_mem_korthikanti_a100": _korthikanti,
    "e2e_mem_colossalai": _colossal,
    "oom_bmtrain_v100": _bmtrain,
    "oom_megatron_bridge": _bridge_study,
}


def _peak(column: str, unit: float) -> Callable[[Row, TrainingRun, Ranks], Values]:
    """A column that holds the peak of the fullest rank."""
    return lambda row, run, memory: {column: max(rank.peak for rank in memory(run)) / unit}


def _titan_memory(row: Row, run: TrainingRun, memory: Ranks) -> Values:
    """torchtitan prints what the allocator reserves."""
    return {"peak_mem_gib_max_rank": max(rank.reserved for rank in memory(run)) / GIB}


def _golden_memory(row: Row, run: TrainingRun, memory: Ranks) -> Values:
    """Megatron writes the memory of its last rank, which is of the last pipeline stage."""
    last = memory(run)[-1]
    return {"mem_max_allocated_bytes": last.peak, "mem_allocated_bytes_last": last.between_steps}


def _korthikanti_memory(row: Row, run: TrainingRun, memory: Ranks) -> Values:
    """The paper's formulas count the layers alone, without embedding and head."""
    quantity = text(row, "quantity")
    if quantity == "params_grads_optimizer_mem":
        return {"value": max(rank.block_states for rank in memory(run)) / GIB}
    if quantity == "activation_mem":
        return {"value": _kept(run, memory) / GIB}
    if quantity == "activation_mem_relative_to_none":
        plain = replace(run, parallel=replace(run.parallel, sequence_parallel=False, recompute="none"))
        return {"value": 100 * _kept(run, memory) / _kept(plain, memory)}
    raise Unpredictable(f"{quantity} is of kind step")


def _kept(run: TrainingRun, memory: Ranks) -> float:
    return max(rank.block_saved for rank in memory(run))


def _galvatron_memory(row: Row, run: TrainingRun, memory: Ranks) -> Values:
    """memory_allocated after backward, what forward added, and the peak beyond the first; rank 7 is of the last stage.

    (galvatron/core/profiler/runtime_profiler.py: post_profile_memory; gradients stay allocated between steps.)
    """
    of_ranks = memory(run)
    rank = of_ranks[0] if integer(row, "rank") == 0 else of_ranks[-1]
    quantities = {"ms": rank.between_steps, "act": rank.saved, "act_peak": rank.peak - rank.between_steps}
    if text(row, "quantity") not in quantities:
        raise Unpredictable(f"quantity {text(row, 'quantity')!r} is none of {', '.join(quantities)}")
    return {"value_mb": quantities[text(row, "quantity")] / MIB}


_MEMORY_VALUES: Mapping[str, Callable[[Row, TrainingRun, Ranks], Values]] = {
    "e2e_mem_megatron_golden": _golden_memory,
    "e2e_mem_simumax_b200": _peak("peak_alloc_gib", GIB),
    "e2e_mem_torchtitan": _titan_memory,
    "e2e_mem_korthikanti_a100": _korthikanti_memory,
    "e2e_mem_colossalai": _peak("peak_mem_mib", MIB),
    "mem_galvatron_llama2_7b": _galvatron_memory,
    "oom_megatron_bridge": _peak("peak_mem_gb", 1e9),
}
