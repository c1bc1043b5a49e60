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
from dataclasses import dataclass
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
from autopar.passes.partition import split_forward_backward
from autopar.phases import phase
from autopar.planner.search import Mode
from autopar.program import Program
from autopar.rules.engine import registered_rules
from autopar.runtime.batches import BatchMode, route
from autopar.runtime.consensus import agree_on_fingerprint, agree_on_plan, attempt_on_all, from_first_rank
from autopar.runtime.emit import Step, emit
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
    )
    args, kwargs = normalize_example_inputs(example_inputs)
    with without_wrappers(model) as plain:
        program = _capture(plain, args, kwargs, plain.training, options, Captures())
    return _plan(program, options, None)


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
) -> Step:
    """The journey of one graph, from the module to the function that this rank runs."""
    program = attempt_on_all(lambda: _capture(model, args, kwargs, training, options, captures))
    mark = fingerprint(program)
    agree_on_fingerprint(mark)
    if pinned is None:
        agree_on_plan(given)
    if given is not None and pinned is None:
        chosen = given
        _check_plan(chosen, mark)
    else:
        text = from_first_rank(lambda: _plan(program, options, pinned).to_json())
        chosen = Plan.from_json(text)
    return realize(program, chosen, groups or ProcessGroups(chosen.mesh, _device_type(model)))


def realize(program: Program, chosen: Plan, groups: ProcessGroups) -> Step:
    """The function that this rank runs: the captured program under a plan; all ranks call it alike."""
    with phase("lower", logging.INFO):
        lowered = attempt_on_all(lambda: lower(program, chosen, rank()))
        recompute = [name for name, operator in chosen.operators.items() if operator.recompute]
        partition = split_forward_backward(lowered, recompute)
    return emit(program, lowered, partition, chosen, groups)


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


def _plan(program: Program, options: Options, pinned: Plan | None) -> Plan:
    """A plan by `options`, or with the mesh and parameter layouts of `pinned`; kept in the cache where there is one."""
    if pinned is not None:
        return _plan_pinned(program, options, pinned)
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
        progress=log.info,
    )
    _report_uncovered(chosen, options.strict)
    if path is not None:
        write_atomically(path, chosen.to_json())
    return chosen


def _plan_pinned(program: Program, options: Options, pinned: Plan) -> Plan:
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
