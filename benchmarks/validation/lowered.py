"""A published run as the program that one rank of one pipeline stage runs, made by autopar's own road.

    module on meta (one layer of each kind) -> capture -> plan under the run's constraints -> lowering -> partition

Nothing depends on the number of layers, stages or micro-batches, so the rows of a file share a few dozen programs. The
mesh is that of the whole run, in the rank order of Megatron: tensor parallelism innermost, then data, then pipeline.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.errors import ConfigurationError
from autopar.layout import Mesh
from autopar.parallel_plan import Plan
from autopar.passes.lower import lower
from autopar.passes.partition import Partition, split_forward_backward
from autopar.passes.segments import placed
from autopar.program import Program
from benchmarks.validation.models import build_model, example, layer_kinds, layer_sequence, without_layers
from benchmarks.validation.published_plan import axes_of, published_plan, with_recomputation
from benchmarks.validation.runs import ModelShape, ParallelShape, TrainingRun

PIPELINE_AXIS = "pp"


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
        model_part(run), run.stack.dtype, run.stack.attention != "unfused",
        _KnownCluster(run.cluster.fingerprint, run.cluster), _plan_part(parallel),
        parallel.recompute,
    )  # fmt: skip
    kinds = [kind for kind, _ in layer_kinds(run.model)]
    layers = [f"layers.{kinds.index(kind)}" for kind in layer_sequence(run.model)]
    axes = {PIPELINE_AXIS: parallel.pp, **axes_of(parallel)}
    return LoweredRun(
        program=program,
        plan=plan,
        partition=partition,
        chunks=placed(layers, parallel.pp * parallel.virtual_stages, first="embedding", last="head"),
        mesh=Mesh(axis_names=tuple(axes), shape=tuple(axes.values())),
    )


def check_expressible(run: TrainingRun) -> None:
    """Raise ConfigurationError naming what no plan of autopar can say yet."""
    reasons = {
        "context parallelism has no executable form": run.parallel.cp > 1,
        "expert parallelism has no executable form": run.parallel.ep > 1,
        f"models of the family {run.model.family} are not built": run.model.family in ("t5", "hybrid"),
        "only adapters are trained": run.adapter_rank > 0,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ConfigurationError("; ".join(found))


def model_part(run: TrainingRun) -> ModelShape:
    """What the captured module depends on: no number of layers; stages of a pipeline each hold their own copy of a
    tied embedding."""
    shape = without_layers(run.model)
    return replace(shape, tied_embeddings=shape.tied_embeddings and run.parallel.pp == 1)


def _plan_part(parallel: ParallelShape) -> ParallelShape:
    """What the plan of a stage depends on."""
    return ParallelShape(
        tp=parallel.tp,
        dp=parallel.dp,
        zero_stage=3 if parallel.zero_stage == 3 else 0,
        sequence_parallel=parallel.sequence_parallel,
        micro_batch=parallel.micro_batch,
    )


@functools.lru_cache(maxsize=64)
def _partitioned(
    shape: ModelShape, dtype: str, flash: bool, cluster: _KnownCluster, parallel: ParallelShape, recompute: str
) -> tuple[Program, Plan, Partition]:
    program, plan = _planned(shape, dtype, flash, cluster, parallel)
    plan = with_recomputation(plan, replace(parallel, recompute=recompute))  # type: ignore[arg-type]
    again = [name for name, operator in plan.operators.items() if operator.recompute]
    return program, plan, split_forward_backward(program, again)


@functools.lru_cache(maxsize=64)
def _planned(
    shape: ModelShape, dtype: str, flash: bool, cluster: _KnownCluster, parallel: ParallelShape
) -> tuple[Program, Plan]:
    program = _captured(shape, dtype, flash, parallel.micro_batch * parallel.dp)
    plan = published_plan(program, cluster.cluster, parallel)
    return lower(program, plan, rank=0), plan


@functools.lru_cache(maxsize=16)
def _captured(shape: ModelShape, dtype: str, flash: bool, batch: int) -> Program:
    kinds = tuple(kind for kind, _ in layer_kinds(shape))
    return capture(build_model(shape, kinds, dtype=dtype, flash=flash), (), example(shape, batch))
