"""Questions: how the answer to a request is found: capture the model, then plan it or read the cache.

request = Request(cluster=as_cluster("8 H100-SXM"), memory_limit="40GiB")
captured = capture_model(model, args, kwargs, request, Captures())
plan = plan_program(captured.program, request, captured)
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from autopar.capture import Captures, fingerprint
from autopar.capture.branches import Notes
from autopar.capture.example_run import read_example
from autopar.errors import CaptureError, ConfigurationError, PlanMismatchError, UnsupportedOperatorError
from autopar.files import write_atomically
from autopar.hardware.cluster import Cluster, check_cluster
from autopar.planner.batch.micro_batch_program import Recapture
from autopar.planner.planning import make_plan
from autopar.planner.problem.program_cache import ProgramCache
from autopar.plans.capacity_factor import CAPPED
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import PipelinePlan
from autopar.program import Program, batch_size
from autopar.request import Request
from autopar.rules.engine import discovered_rules, registered_rules
from autopar.rules.learning import adopt_rules, learn_rules
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.process_groups import world_size
from autopar.runtime.step.batches import input_leaves, ordered, route
from autopar.schedules.list_scheduler import TIMED_FAMILIES
from autopar.timing import phase

log = logging.getLogger(__name__)

LOOK_FOR_RULES = "discover=True (--discover) looks for rules by executing them"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedModel:
    """A captured model, which can be captured again at another size of its batch: a `Recapture`.

    args, kwargs: of the whole batch. captures: of this model, those at other sizes among them."""

    program: Program
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    request: Request
    captures: Captures

    def at_batch(self, size: int) -> Program:
        """From the first samples of the arguments."""
        args, kwargs = route(self.model, self.args, self.kwargs, self.request.loss_fn is not None)
        leaves, spec = ordered(args, kwargs, self.program)
        dims = {}
        for entry, leaf in input_leaves(self.program):
            dims[entry.name] = entry.batch_dim
            if entry.batch_dim is not None:
                leaves[leaf] = leaves[leaf].narrow(entry.batch_dim, 0, size)
        args, kwargs = spec.unflatten(leaves)
        request = replace(self.request, batch_dims=dims)
        return capture_program(self.model, args, kwargs, self.program.training, request, self.captures)


def capture_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    captures: Captures,
    *,
    training: bool | None = None,
) -> CapturedModel:
    """The model captured for a request. training: None for the mode that it is in."""
    mode = model.training if training is None else training
    program = capture_program(model, args, kwargs, mode, request, captures)
    return CapturedModel(program=program, model=model, args=args, kwargs=kwargs, request=request, captures=captures)


def capture_example(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request, captures: Captures
) -> CapturedModel:
    """As `capture_model`, with the branches of these arguments."""
    if request.branches is not None:
        captures.notes = note_branches(model, args, kwargs, request, captures)
    return capture_model(model, args, kwargs, request, captures)


def capture_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    training: bool,
    request: Request,
    captures: Captures,
) -> Program:
    """The program of a model alone. Python reads the values that `captures` has notes of, where it may read any."""
    with phase("capture", logging.INFO):
        args, kwargs, batch = _routed(model, args, kwargs, request)
        return captures.capture(
            model,
            args,
            kwargs,
            loss_fn=request.loss_fn,
            batch=batch,
            batch_dims=request.batch_dims,
            training=training,
            precision=request.precision,
            reduce_dtype=request.reduce_dtype,
            differentiable=request.differentiable,
            notes=None if request.branches is None else captures.notes,
        )


def note_branches(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    captures: Captures,
    *,
    training: bool | None = None,
) -> Notes:
    """What Python reads of values in a forward on these arguments, and in those before: the branches of a capture."""
    args, kwargs, batch = _routed(model, args, kwargs, request)
    with phase("example", logging.INFO):
        found = read_example(
            model,
            args,
            kwargs,
            loss_fn=request.loss_fn,
            batch=batch,
            training=model.training if training is None else training,
            precision=request.precision,
            known=captures.notes,
        )
    return {**captures.notes, **found}


def _routed(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: Request
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """What forward takes, and what the loss function gets beside it."""
    args, kwargs = route(model, args, kwargs, request.loss_fn is not None)
    return args, kwargs, kwargs.pop("batch", None) if request.loss_fn is not None else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuleBook:
    """A `Recapture` that learns rules for the operators of what it captures that have none, where that is asked for.

    found: call -> discovered rule, of all programs so far. is_new: whether the first program brought some."""

    recapture: Recapture
    discover: bool
    found: dict[str, str | None]
    is_new: bool

    @staticmethod
    def of(program: Program, discover: bool, recapture: Recapture) -> RuleBook:
        """The book of a program, and of what is captured at other sizes of its batch."""
        before = discovered_rules(program)
        found = dict(learn_rules(program)) if discover else before
        return RuleBook(recapture=recapture, discover=discover, found=found, is_new=found != before)

    def at_batch(self, size: int) -> Program:
        """The program at another size of its batch."""
        program = self.recapture.at_batch(size)
        self.found.update(learn_rules(program) if self.discover else discovered_rules(program))
        return program


def plan_program(program: Program, request: Request, recapture: Recapture, kept: ProgramCache | None = None) -> Plan:
    """A plan for a request, from its cache where it has one. kept: results of earlier questions about the program."""
    rules = RuleBook.of(program, request.discover, recapture)
    if rules.is_new and kept is not None:
        kept.forget()
    path = _cache_path(program, request)
    if path is not None and path.exists():
        known = Plan.load(path)
        adopt_rules(program, known.discovered)
        _report_uncovered(known, request)
        return known
    chosen = replace(make_plan(program, request, recapture=rules, kept=kept), discovered=rules.found)
    _report_uncovered(chosen, request)
    if path is not None:
        write_atomically(path, chosen.to_json())
    return chosen


def plan_again(program: Program, request: Request, pinned: Plan, recapture: Recapture) -> Plan:
    """A plan for another input shape or mode of a planned model: activations anew, parameters keep their layouts.

    A pipeline keeps its stages, and the layouts of every operator: they are by name, whatever the shapes are. Raises
    PlanMismatchError where it was planned without the backward pass that is asked for now.
    """
    if pinned.in_stages:
        if program.training and not any(name.endswith("/bwd") for name in pinned.operators):
            raise PlanMismatchError(
                "this pipeline was planned for a forward pass alone, and does not say where operators of backward run: "
                "call model.train() before autopar.compile where the module is to be trained"
            )
        return _same_stages(pinned, pinned.staged, batch_size(program))
    log.info("planning anew for other inputs, parameters keep their layouts")
    named = not set(pinned.mesh.axis_names) <= {"outer", "inner"}
    again = Request(
        cluster=request.cluster,
        mesh=None if named else pinned.mesh.shape,
        dims=dict(zip(pinned.mesh.axis_names, pinned.mesh.shape, strict=True)) if named else None,
        optimizer=request.optimizer,
        memory_limit=request.memory_limit,
        parameter_layouts=pinned.parameters,
        expert_order=pinned.expert_order,
        precision=request.precision,
        reduce_dtype=request.reduce_dtype,
        deterministic=request.deterministic,
        kernels=pinned.kernels,
        ep=None if pinned.expert_capacity is None else CAPPED,
        expert_capacity=pinned.expert_capacity,
        with_baselines=False,
        mode=request.mode,
    )
    rules = RuleBook.of(program, request.discover or bool(pinned.discovered), recapture)
    return replace(make_plan(program, again, recapture=rules), discovered=rules.found)


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


def _cache_path(program: Program, request: Request) -> Path | None:
    if request.cache_dir is None:
        return None
    question = [
        fingerprint(program),
        request.as_question(program),
        request.memory_limit,
        _name_of(request.optimizer),
        request.with_baselines,
        request.mode,
        request.time_limit,
        request.recompute,
        request.kernels,
        registered_rules(program),
        request.discover,
        discovered_rules(program),
    ]
    digest = hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()
    return Path(request.cache_dir) / f"plan-{digest[:24]}.json"


def _name_of(optimizer: Any) -> str:
    kind = optimizer if isinstance(optimizer, type) or callable(optimizer) else type(optimizer)
    return getattr(kind, "__qualname__", repr(kind))


def _report_uncovered(chosen: Plan, request: Request) -> None:
    if not chosen.uncovered:
        return
    lines = ", ".join(f"{name} ({seconds * 1e3:.3f} ms)" for name, seconds in sorted(chosen.uncovered.items()))
    looked = "discover=True found none, the log says why" if request.discover else LOOK_FOR_RULES
    if request.strict:
        raise UnsupportedOperatorError(
            f"operators without a sharding rule (strict=True): {lines}; {looked}; `autopar rules discover "
            "LIBRARY::OPERATOR --example '...'` proposes one, autopar.register_rule adds it"
        )
    log.warning("operators without a sharding rule run whole on every device, predicted cost: %s; %s", lines, looked)


def as_cluster(cluster: Cluster | str | None) -> Cluster:
    """The cluster that a user means: itself, a file of one, a description, or (None) this machine."""
    if isinstance(cluster, Cluster):
        check_cluster(cluster)
        return cluster
    if cluster is None:
        return Cluster.detect(world_size() if dist.is_initialized() else None)
    if not isinstance(cluster, str):
        raise ConfigurationError(
            f'cluster={cluster!r}: write a description ("2x8 H100-SXM", "4 cpu"), a file or an autopar.Cluster'
        )
    return Cluster.from_file(cluster) if cluster.endswith(".json") else Cluster.parse(cluster)


def check_model(model: object) -> None:
    """Raises CaptureError and ConfigurationError for what cannot be planned."""
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"expected a torch.nn.Module, got {type(model).__name__}; wrap a function in a module that calls it in "
            "its forward"
        )
    if isinstance(model, ParallelModule):
        raise ConfigurationError("this module is compiled already; pass the original model")
    unmade = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if unmade:
        raise ConfigurationError(
            f"{', '.join(unmade[:3])} of {len(unmade)} lazy tensors is not made yet (nn.Lazy...): call the model once "
            "with a batch, which gives it its shape, and compile it then"
        )
