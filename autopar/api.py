"""The two entry points: `compile` trains a model under a plan, `plan` only makes one.

Both walk the journey of a model: capture and tidy -> enumerate, price and solve (`make_plan`) -> lower -> partition
-> emit -> run. Planning needs neither processes nor weights; what runs is a `ParallelModule`.
"""

from __future__ import annotations

import copy
import functools
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

from autopar.capture import Captures, fingerprint, normalize_example_inputs, take_off_wrappers, without_wrappers
from autopar.capture.precision import precision_dtype
from autopar.cluster import Cluster
from autopar.errors import CaptureError, ConfigurationError, PlanMismatchError, UnsupportedOperatorError
from autopar.files import write_atomically
from autopar.parallel_plan import Plan
from autopar.passes.lower import lower
from autopar.passes.micro_batches import for_micro_batches
from autopar.passes.partition import split_forward_backward
from autopar.phases import phase
from autopar.planner.batch_flow import NotSeparable
from autopar.planner.micro_batches import AtBatch, in_parts
from autopar.planner.search import Mode
from autopar.program import MicroProgram, Program
from autopar.rules.engine import registered_rules
from autopar.runtime.batches import BatchMode, input_leaves, ordered, route
from autopar.runtime.consensus import agree_on_fingerprint, agree_on_plan, attempt_on_all, from_first_rank
from autopar.runtime.emit import Step, emit
from autopar.runtime.micro_batches import MicroStep, emit_micro
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.process_groups import ProcessGroups, rank, world_size
from autopar.verification import Verification, compare

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
    dims: Mapping[str, int] | None = None
    memory_limit: float | str | None = None
    constraints: Any = None
    precision: str | None = None
    batch_dims: Mapping[str, int | None] | None = None
    strict: bool = False
    mode: Mode = "default"
    cache_dir: Path | None = None
    micro_batches: int | None = None
    with_baselines: bool = True


def compile(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: Any = None,
    cluster: Cluster | str | None = None,
    mesh: Sequence[int] | None = None,
    dims: Mapping[str, int] | None = None,
    plan: Plan | str | Path | None = None,
    memory_limit: float | str | None = None,
    constraints: Any = None,
    precision: str | None = None,
    batch: BatchMode = "global",
    batch_dims: Mapping[str, int | None] | None = None,
    verify: bool = False,
    strict: bool = False,
    mode: Mode = "default",
    cache_dir: str | Path | None = None,
    micro_batches: int | None = None,
) -> ParallelModule:
    """Plan `model` for the running processes and return the module that trains under the plan; `model` is consumed.

    example_inputs: a tensor (one argument), tuple or list (positional) or dict (keywords), of the *global* shapes,
        fake and meta tensors too; without it the module is planned at its first call.
    loss_fn: `loss_fn(output, batch)` -> 0-dim loss; batch is what the module is called with. Names in a dict batch
        that `forward` does not take go to loss_fn only.
    optimizer: a class or factory (its state is planned for) or an instance (its parameters are exchanged).
    cluster: default: the running processes on this machine. mesh, dims: fix sizes, or named axes (-1 fills).
    precision: "bf16" computes in bf16 from fp32 parameters; gradients, their reductions and the loss stay fp32.
    plan: a Plan or its file, instead of planning; its precision holds where none is given.
    batch: "global" (each rank passes all of it) or "local" (its part, see `ParallelModule.data_shard`).
    verify: compare with the plain model before returning. strict: an operator without a rule is an error.
    mode: how long the planner may search: "fast" (seconds), "default", or "max" (many minutes); see `plan.gap`.
    cache_dir: folder in which plans are kept.
    micro_batches: parts of the batch that a call runs in turn; default: one, or more where memory asks for it.

    Raises ConfigurationError, CaptureError, InfeasibleError, PlanMismatchError, RankMismatchError,
    UnsupportedOperatorError and VerificationError, on every rank.
    """
    _check_options(model, precision, batch, mode)
    model = take_off_wrappers(model)
    given, running = attempt_on_all(lambda: (_load(plan), _running_cluster(cluster)))
    if precision is None and given is not None:
        precision = given.question.get("precision")
    options = Options(
        cluster=running,
        loss_fn=loss_fn,
        optimizer=optimizer,
        mesh=mesh,
        dims=dims,
        memory_limit=memory_limit,
        constraints=constraints,
        precision=precision,
        batch_dims=batch_dims,
        strict=strict,
        mode=mode,
        cache_dir=None if cache_dir is None else Path(cache_dir),
        micro_batches=micro_batches,
        with_baselines=dims is None and mesh is None,  # who pins the mesh wants to train, not to compare
    )
    instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    build = functools.partial(_build, options=options, given=given, captures=Captures())
    module = ParallelModule(model, build, batch=batch, optimizer=instance, loss_fn=loss_fn, precision=precision)
    if example_inputs is None:
        if verify:
            raise ConfigurationError("verify=True needs example_inputs; or call autopar.verify after the first call")
        return module
    args, kwargs = normalize_example_inputs(example_inputs)
    module.build_for(args, kwargs)
    if verify:
        compare(module, example_inputs)
    return module


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    cluster: Cluster | str | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: Any = None,
    mesh: Sequence[int] | None = None,
    dims: Mapping[str, int] | None = None,
    memory_limit: float | str | None = None,
    constraints: Any = None,
    precision: str | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    strict: bool = False,
    mode: Mode = "default",
    cache_dir: str | Path | None = None,
    micro_batches: int | None = None,
) -> Plan:
    """The best plan of `model` for `cluster`, without processes, devices or weights; arguments as of `compile`.

    cluster: a Cluster, its description ("2x8 H100-SXM") or a file; default: this machine.
    Raises ConfigurationError, CaptureError, InfeasibleError and UnsupportedOperatorError.
    """
    _check_options(model, precision, "global", mode)
    options = Options(
        cluster=_as_cluster(cluster),
        loss_fn=loss_fn,
        optimizer=optimizer,
        mesh=mesh,
        dims=dims,
        memory_limit=memory_limit,
        constraints=constraints,
        precision=precision,
        batch_dims=batch_dims,
        strict=strict,
        mode=mode,
        cache_dir=None if cache_dir is None else Path(cache_dir),
        micro_batches=micro_batches,
    )
    args, kwargs = normalize_example_inputs(example_inputs)
    with without_wrappers(model) as plain:
        captures = Captures()
        program = _capture(plain, args, kwargs, plain.training, options, captures)
        return _plan(
            program, options, None, functools.partial(_capture_at, program, plain, args, kwargs, options, captures)
        )


def verify(
    module_or_model: nn.Module,
    example_inputs: Any,
    *,
    plan: Plan | str | Path | None = None,
    loss_fn: LossFunction | None = None,
    precision: str | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
) -> Verification:
    """Compare a compiled module with the plain model: loss and every gradient; all ranks call it alike.

    A plain model is copied and compiled first, under `plan` where one is given. example_inputs: real tensors of the
    global batch. Raises VerificationError naming the worst parameter, with numbers, and the errors of `compile`.
    """
    if isinstance(module_or_model, ParallelModule):
        if plan is not None and plan != module_or_model.plan:
            raise ConfigurationError("this module has another plan; pass the plain model to verify a plan")
        return compare(module_or_model, example_inputs)
    module = compile(
        copy.deepcopy(module_or_model),
        example_inputs,
        plan=plan,
        loss_fn=loss_fn,
        precision=precision,
        batch_dims=batch_dims,
    )
    return compare(module, example_inputs)


def _build(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    training: bool,
    pinned: Plan | None,
    groups: ProcessGroups | None,
    options: Options,
    given: Plan | None,
    captures: Captures,
) -> Step | MicroStep:
    """The journey of one graph, from the module to the function that this rank runs."""
    program = attempt_on_all(lambda: _capture(model, args, kwargs, training, options, captures))
    agree_on_fingerprint(fingerprint(program))
    at_batch = functools.partial(_capture_at, program, model, args, kwargs, options, captures)
    if pinned is None:
        agree_on_plan(given)
    if given is not None and pinned is None:
        chosen = given
    else:
        text = from_first_rank(lambda: _plan(program, options, pinned, at_batch).to_json())
        chosen = Plan.from_json(text)
    step = attempt_on_all(lambda: _in_parts(program, chosen, at_batch))
    if given is not None and pinned is None:
        _check_plan(chosen, fingerprint(program if step is None else step.program))
    return realize(step or program, chosen, groups or ProcessGroups(chosen.mesh, _device_type(model)))


def _in_parts(program: Program, chosen: Plan, at_batch: AtBatch) -> MicroProgram | None:
    """The program in the micro-batches of the plan; None where that is the whole batch."""
    if chosen.micro_batches == 1:
        return None
    try:
        return in_parts(program, chosen.micro_batches, at_batch)
    except NotSeparable as reason:
        raise PlanMismatchError(
            f"the plan runs {chosen.micro_batches} micro-batches, but this model cannot: {reason}; plan again"
        ) from reason


def realize(program: Program | MicroProgram, chosen: Plan, groups: ProcessGroups) -> Step | MicroStep:
    """The function that this rank runs: the captured program under a plan; all ranks call it alike."""
    part = program.program if isinstance(program, MicroProgram) else program
    with phase("lower", logging.INFO):
        lowered = attempt_on_all(lambda: lower(part, chosen, rank()))
        recompute = [name for name, operator in chosen.operators.items() if operator.recompute]
        partition = split_forward_backward(lowered, recompute)
    if isinstance(program, MicroProgram):
        return emit_micro(program, lowered, for_micro_batches(lowered, partition), chosen, groups)
    return emit(program, lowered, partition, chosen, groups)


def _capture_at(
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
    return _capture(model, args, kwargs, program.training, replace(options, batch_dims=dims), captures)


def _capture(
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


def _plan(program: Program, options: Options, pinned: Plan | None, at_batch: AtBatch) -> Plan:
    """A plan by `options`, or with the mesh and parameter layouts of `pinned`; kept in the cache where there is one.

    at_batch: captures the model at another size of the batch.
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
        at_batch=at_batch,
        progress=log.info,
    )
    _report_uncovered(chosen, options.strict)
    if path is not None:
        write_atomically(path, chosen.to_json())
    return chosen


def _plan_pinned(program: Program, options: Options, pinned: Plan, at_batch: AtBatch) -> Plan:
    """Plan activations anew for another input shape or mode; parameters keep their layouts."""
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


def _question(program: Program, options: Options) -> dict[str, Any]:
    """What the plan answers, as JSON values."""
    inputs = {v.name: [list(v.shape), str(v.dtype)] for v in program.inputs if v.role == "input"}
    return {
        "inputs": inputs,
        "mesh": None if options.mesh is None else list(options.mesh),
        "dims": None if options.dims is None else dict(options.dims),
        "precision": options.precision,
        "micro_batches": options.micro_batches,
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


def _load(plan: Plan | str | Path | None) -> Plan | None:
    return Plan.load(plan) if isinstance(plan, str | Path) else plan


def _check_plan(chosen: Plan, mark: str) -> None:
    if chosen.mesh.size != world_size():
        raise PlanMismatchError(
            f"the plan is for {chosen.mesh.size} devices (mesh {chosen.mesh.shape}), {world_size()} processes are "
            f"running: start {chosen.mesh.size} (torchrun --nproc-per-node), or plan again"
        )
    if chosen.fingerprint != mark:
        raise PlanMismatchError(
            f"the plan was made for another graph (fingerprint {chosen.fingerprint[:12]}, this model with these inputs "
            f"has {mark[:12]}): pass the same model configuration, input shapes and loss, or plan again"
        )


def _check_options(model: object, precision: str | None, batch: str, mode: str) -> None:
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


def _as_cluster(cluster: Cluster | str | None) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        return Cluster.detect(world_size() if dist.is_initialized() else None)
    return Cluster.from_file(cluster) if cluster.endswith(".json") else Cluster.parse(cluster)


def _running_cluster(cluster: Cluster | str | None) -> Cluster:
    chosen = Cluster.detect(world_size()) if cluster is None else _as_cluster(cluster)
    if chosen.num_devices != world_size():
        raise ConfigurationError(
            f"cluster {chosen.name!r} has {chosen.num_devices} devices, {world_size()} processes are running: start "
            f"{chosen.num_devices} (torchrun --nproc-per-node), or use autopar.plan to plan for a cluster elsewhere"
        )
    return chosen


def _device_type(model: nn.Module) -> str:
    if dist.is_initialized():
        return "cuda" if "nccl" in dist.get_backend() else "cpu"
    first = next(model.parameters(), torch.empty(0))
    return "cuda" if first.is_cuda or (first.is_meta and torch.cuda.is_available()) else "cpu"
