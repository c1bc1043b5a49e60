"""A published run as the program that one rank of one pipeline stage runs, made by autopar's own road.

    module on meta (one layer of each kind) -> capture -> plan under the run's constraints -> lowering -> partition

Nothing depends on the number of layers, stages or micro-batches, so the rows of a file share a few dozen programs. The
mesh is that of the whole run, in the rank order of Megatron: tensor parallelism innermost, then data, then pipeline.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import Literal

from autopar.capture import capture
from autopar.errors import ConfigurationError
from autopar.graphs.forward_backward import Partition
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.passes.lowering.chain import join_kernels, lowered_step, resumed, split
from autopar.passes.lowering.stage import LoweredStep
from autopar.passes.module_segments import placed
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from benchmarks.validation.models import build_model, example, layer_kinds, layer_sequence, without_layers
from benchmarks.validation.published_plan import axes_of, data_axis, published_plan, with_recomputation
from benchmarks.validation.runs import ModelShape, ParallelShape, TrainingRun

PIPELINE_AXIS = "pp"

MODEL_REPLICAS = 2
"""Data-parallel ranks of a plan that stands for any number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredRun:
    """program: what rank 0 runs for one micro-batch, all segments once (`embedding`, `layers.i` per kind, `head`).
    partition: the same as forward and backward, with recomputation. chunks: the segments of every model chunk, in
    model order (chunk c lies on pipeline stage c % pp). mesh: of the whole run, axes "pp", data and "tp"."""

    program: Program
    plan: Plan
    partition: Partition
    chunks: tuple[tuple[str, ...], ...]
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class _KnownCluster:
    """A cluster as a key of caches."""

    fingerprint: str
    cluster: Cluster = field(compare=False)


def lowered(run: TrainingRun) -> LoweredRun:
    """The lowered program of a run. Raises ConfigurationError where it cannot be expressed, with the reason."""
    check_expressible(run)
    parallel = run.parallel
    program, plan, partition = _partitioned(
        *captured_part(run), _KnownCluster(run.cluster.fingerprint, run.cluster), _plan_part(parallel),
        parallel.recompute, parallel.recompute_modules,
    )  # fmt: skip
    return LoweredRun(program=program, plan=plan, partition=partition, chunks=chunks(run), mesh=mesh(run))


def chunks(run: TrainingRun) -> tuple[tuple[str, ...], ...]:
    """The segments of every model chunk of a run, in model order."""
    kinds = [kind for kind, _ in layer_kinds(run.model)]
    layers = [f"layers.{kinds.index(kind)}" for kind in layer_sequence(run.model)]
    count, sizes = run.parallel.pp * run.parallel.virtual_stages, run.parallel.layers_per_chunk
    if not sizes:
        return placed(layers, count, first="embedding", last="head")
    if len(sizes) != count or sum(sizes) != len(layers):
        raise ConfigurationError(f"chunks of {sizes} layers are no {count} chunks of {len(layers)} layers")
    ends = list(itertools.accumulate(sizes))
    runs = [tuple(layers[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    runs[0], runs[-1] = ("embedding", *runs[0]), (*runs[-1], "head")
    return tuple(runs)


def mesh(run: TrainingRun) -> Mesh:
    """The mesh of the whole run; ranks of one context-parallel group stand beside each other in the data axis."""
    axes = {PIPELINE_AXIS: run.parallel.pp, **axes_of(run.parallel)}
    axes[data_axis(run.parallel)] *= run.parallel.cp
    return Mesh(axis_names=tuple(axes), shape=tuple(axes.values()))


def check_expressible(run: TrainingRun) -> None:
    """Raise ConfigurationError naming what no plan of autopar can say yet."""
    reasons = {
        "pipelines of encoder and decoder are not built": run.model.family == "t5" and run.parallel.pp > 1,
        "an encoder-decoder needs the length of its decoder's sequences": (
            run.model.family == "t5" and not run.model.decoder_seq_len
        ),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigurationError("; ".join(found))


def captured_part(run: TrainingRun) -> tuple[ModelShape, str, bool, int]:
    """What the captured module depends on: (shape, dtype, flash attention, ranks over which experts are cut).

    Stages of a pipeline each hold their own copy of a tied embedding; ranks of context parallelism a part of the
    sequence; ranks of expert parallelism a part of the experts, for as many rows.
    """
    parallel, shape = run.parallel, without_layers(run.model)
    shape = replace(
        shape,
        tied_embeddings=shape.tied_embeddings and parallel.pp == 1,
        seq_len=max(1, shape.seq_len // parallel.cp),
    )
    return shape, run.stack.dtype, run.stack.attention != "unfused", parallel.ep


def _plan_part(parallel: ParallelShape) -> ParallelShape:
    """What the plan of a stage depends on. Two data-parallel ranks stand for any number of them: the program of one
    rank is the same, and its collectives are priced on the mesh of the whole run."""
    return ParallelShape(
        tp=parallel.tp,
        dp=min(parallel.dp * parallel.cp, MODEL_REPLICAS),
        zero_stage=3 if parallel.zero_stage == 3 else 0,
        sequence_parallel=parallel.sequence_parallel,
        micro_batch=parallel.micro_batch,
    )


@functools.lru_cache(maxsize=64)
def _partitioned(
    shape: ModelShape,
    dtype: str,
    flash: bool,
    expert_ranks: int,
    cluster: _KnownCluster,
    parallel: ParallelShape,
    recompute: Literal["none", "selective", "full"],
    modules: tuple[str, ...],
) -> tuple[Program, Plan, Partition]:
    step = _planned(shape, dtype, flash, expert_ranks, cluster, parallel)
    plan = with_recomputation(step.plan, replace(parallel, recompute=recompute, recompute_modules=modules))
    stage = resumed(step, plan, until=split).only
    return stage.program, plan, stage.partition


@functools.lru_cache(maxsize=64)
def _planned(
    shape: ModelShape, dtype: str, flash: bool, expert_ranks: int, cluster: _KnownCluster, parallel: ParallelShape
) -> LoweredStep:
    program = _captured(shape, dtype, flash, expert_ranks, parallel.micro_batch * parallel.dp)
    plan = published_plan(program, cluster.cluster, parallel)
    return lowered_step(program, plan, 0, until=join_kernels)


@functools.lru_cache(maxsize=16)
def _captured(shape: ModelShape, dtype: str, flash: bool, expert_ranks: int, batch: int) -> Program:
    kinds = tuple(kind for kind, _ in layer_kinds(shape))
    return capture(
        build_model(shape, kinds, dtype=dtype, flash=flash, expert_ranks=expert_ranks), (), example(shape, batch)
    )
