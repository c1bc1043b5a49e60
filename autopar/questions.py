"""Questions: what a user asks beside the model, and how the answer is found: capture, then plan or read the cache.

options = Options(cluster=as_cluster("8 H100-SXM"), memory_limit="40GiB")
program = capture_program(model, args, kwargs, model.training, options, Captures())
plan = plan_program(program, options, pinned=None, at_batch=...)
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture import Captures, fingerprint
from autopar.capture.precision import precision_dtype
from autopar.cluster import Cluster, MixedCluster
from autopar.errors import CaptureError, ConfigurationError, UnsupportedOperatorError
from autopar.files import write_atomically
from autopar.parallel_plan import Plan
from autopar.phases import phase
from autopar.plan_value import PipelinePlan
from autopar.planner.constraints import Recompute
from autopar.planner.kept import Kept
from autopar.planner.micro_batches import AtBatch, batch_size
from autopar.planner.search import Mode
from autopar.planner.stages.wish import check_stages
from autopar.program import Program
from autopar.rules.engine import registered_rules
from autopar.runtime.batches import input_leaves, ordered, route
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.process_groups import world_size
from autopar.schedules.list_scheduler import TIMED_FAMILIES

log = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any], torch.Tensor]


def _make_plan() -> Callable[..., Plan]:
    """The planner, loaded at the first plan: it brings the solver library, which a given plan does not need."""
    from autopar.planner.planning import make_plan

    return make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user asked for beside the model and its inputs; the fields are the arguments of `compile`."""

    cluster: Cluster
    loss_fn: LossFunction | None = None
    optimizer: Any = None
    mesh: Sequence[int] | None = None
    dims: Mapping[str, int | Sequence[int]] | None = None
    memory_limit: float | str | None = None
    constraints: Any = None
    precision: str | None = None
    batch_dims: Mapping[str, int | None] | None = None
    strict: bool = False
    mode: Mode = "default"
    cache_dir: Path | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    recompute: Recompute | None = None
    time_limit: float | None = None
    warm_start: Plan | str | Path | None = None
    with_baselines: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigurationError for stages that the cluster cannot have: capturing a model may take a minute."""
        if not isinstance(self.cluster, MixedCluster):
            check_stages(self.dims, self.schedule, self.cluster)


def capture_at(
    program: Program,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    captures: Captures,
    size: int,
) -> Program:
    """The model of `program` captured at another size of the batch, from the first samples of the arguments."""
    args, kwargs = route(model, args, kwargs, options.loss_fn is not None)
    leaves, spec = ordered(args, kwargs, program)
    dims = {}
    for entry, leaf in input_leaves(program):
        dims[entry.name] = entry.batch_dim
        if entry.batch_dim is not None:
            leaves[leaf] = leaves[leaf].narrow(entry.batch_dim, 0, size)
    args, kwargs = spec.unflatten(leaves)
    return capture_program(model, args, kwargs, program.training, replace(options, batch_dims=dims), captures)


def capture_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: bool,
    options: Options,
    captures: Captures,
) -> Program:
    with phase("capture", logging.INFO):
        args, kwargs = route(model, args, kwargs, options.loss_fn is not None)
        batch = kwargs.pop("batch", None) if options.loss_fn is not None else None
        return captures.capture(
            model,
            args,
            kwargs,
            loss_fn=options.loss_fn,
            batch=batch,
            batch_dims=options.batch_dims,
            training=training,
            precision=options.precision,
        )


def plan_program(
    program: Program, options: Options, pinned: Plan | None, at_batch: AtBatch, kept: Kept | None = None
) -> Plan:
    """A plan by `options`, or with the mesh and parameter layouts of `pinned`; kept in the cache where there is one.

    at_batch: captures the model at another size of the batch. kept: results of earlier questions about the program.
    """
    if pinned is not None:
        return _plan_pinned(program, options, pinned, at_batch)
    path = _cache_path(program, options)
    if path is not None and path.exists():
        known = Plan.load(path)
        _report_uncovered(known, options.strict)
        return known
    chosen = _make_plan()(
        program,
        options.cluster,
        mesh=options.mesh,
        dims=options.dims,
        optimizer=options.optimizer,
        memory_limit=options.memory_limit,
        constraints=options.constraints,
        question=_question(program, options),
        with_baselines=options.with_baselines,
        mode=options.mode,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        recompute=options.recompute,
        time_limit=options.time_limit,
        warm_start=options.warm_start,
        kept=kept,
        at_batch=at_batch,
        progress=log.info,
    )
    _report_uncovered(chosen, options.strict)
    if path is not None:
        write_atomically(path, chosen.to_json())
    return chosen


def _plan_pinned(program: Program, options: Options, pinned: Plan, at_batch: AtBatch) -> Plan:
    """Plan activations anew for another input shape or mode; parameters keep their layouts.

    A pipeline keeps its stages, and the layouts of every operator: they are by name, whatever the shapes are.
    """
    if pinned.pipeline is not None:
        return _same_stages(pinned, pinned.pipeline, batch_size(program))
    log.info("planning anew for other inputs, parameters keep their layouts")
    named = not set(pinned.mesh.axis_names) <= {"outer", "inner"}
    return _make_plan()(
        program,
        options.cluster,
        mesh=None if named else pinned.mesh.shape,
        dims=dict(zip(pinned.mesh.axis_names, pinned.mesh.shape, strict=True)) if named else None,
        optimizer=options.optimizer,
        memory_limit=options.memory_limit,
        parameter_layouts=pinned.parameters,
        with_baselines=False,
        mode=options.mode,
        at_batch=at_batch,
        progress=log.debug,
    )


def _same_stages(pinned: Plan, pipeline: PipelinePlan, batch: int | None) -> Plan:
    """The stages for another batch: in as many micro-batches, or the next lower number that divides it."""
    if batch is None or batch % pinned.micro_batches == 0:
        return pinned
    family = "1f1b" if pipeline.schedule in (*TIMED_FAMILIES, "searched") else pipeline.schedule
    count = next(n for n in range(min(batch, pinned.micro_batches), 0, -1) if batch % n == 0)
    stages = replace(pipeline, schedule=family, actions=())
    stages.built(count)
    why = f"a batch of {batch} does not split into {pinned.micro_batches} micro-batches: {count}, by {family}"
    log.info(why)
    return replace(pinned, micro_batches=count, pipeline=stages, notes=(*pinned.notes, why))


def _question(program: Program, options: Options) -> dict[str, Any]:
    """What the plan answers, as JSON values."""
    inputs = {v.name: [list(v.shape), str(v.dtype)] for v in program.inputs if v.role == "input"}
    return {
        "inputs": inputs,
        "mesh": None if options.mesh is None else list(options.mesh),
        "dims": None if options.dims is None else dict(options.dims),
        "precision": options.precision,
        "micro_batches": options.micro_batches,
        "schedule": options.schedule,
        "constraints": None if options.constraints is None else str(options.constraints),
        "cluster_fingerprint": options.cluster.fingerprint,
    }


def _cache_path(program: Program, options: Options) -> Path | None:
    if options.cache_dir is None:
        return None
    question = [
        fingerprint(program),
        _question(program, options),
        options.memory_limit,
        _name_of(options.optimizer),
        options.with_baselines,
        options.mode,
        options.time_limit,
        options.recompute,
        registered_rules(program),
    ]
    digest = hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()
    return options.cache_dir / f"plan-{digest[:24]}.json"


def _name_of(optimizer: Any) -> str:
    kind = optimizer if isinstance(optimizer, type) or callable(optimizer) else type(optimizer)
    return getattr(kind, "__qualname__", repr(kind))


def _report_uncovered(chosen: Plan, strict: bool) -> None:
    if not chosen.uncovered:
        return
    lines = ", ".join(f"{name} ({seconds * 1e3:.3f} ms)" for name, seconds in sorted(chosen.uncovered.items()))
    if strict:
        raise UnsupportedOperatorError(
            f"operators without a sharding rule (strict=True): {lines}; `autopar rules discover LIBRARY::OPERATOR "
            "--example '...'` proposes one, autopar.register_rule adds it"
        )
    log.warning("operators without a sharding rule run whole on every device, predicted cost: %s", lines)


def as_cluster(cluster: Cluster | str | None) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        return Cluster.detect(world_size() if dist.is_initialized() else None)
    return Cluster.from_file(cluster) if cluster.endswith(".json") else Cluster.parse(cluster)


def check_options(model: object, precision: str | None, batch: str, mode: str) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"expected a torch.nn.Module, got {type(model).__name__}; wrap a function in a module that calls it in "
            "its forward"
        )
    if isinstance(model, ParallelModule):
        raise ConfigurationError("this module is compiled already; pass the original model")
    if batch not in ("global", "local"):
        raise ConfigurationError(f'batch={batch!r}: write "global" (every rank passes all of it) or "local" (its part)')
    if mode not in get_args(Mode):
        raise ConfigurationError(f"mode={mode!r}: write one of {', '.join(get_args(Mode))}")
    precision_dtype(precision)
