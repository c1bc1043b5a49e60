"""The entry points: `compile` trains a model under a plan, `plan` only makes one, `verify` compares.

Both read what is asked into a `Request` and walk the journey of a model:

    capture, tidy               `capture_model`    a module and inputs -> one graph of forward and backward
    enumerate, price, solve     `plan_program`     graph and request -> Plan, on any machine, without weights
    lower                       `step_to_run`      graph and Plan -> the graphs of this rank, with their collectives
    emit                        `emit_step`        those graphs -> the function that this rank calls
    run                         `ParallelModule`   parameters under their names, loss.backward(), any optimizer
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture import Captures, fingerprint, normalize_example_inputs, take_off_wrappers, without_wrappers
from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.explain.origin import remembering
from autopar.explain.source import Source
from autopar.hardware.cluster import Cluster
from autopar.kept_plans import KeptPlan, KeptPlans
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.passes.lowering.chain import step_to_run
from autopar.passes.lowering.check_plan import refuse_unknown_names
from autopar.passes.lowering.stage import LoweredStep
from autopar.planner.batch.micro_batch_program import Recapture, RecaptureWithKernels, planned_parts
from autopar.planner.batch.shard_layouts import ShardLayouts
from autopar.planner.problem.output_rows import output_rows
from autopar.plans.logical_shards import Deterministic, num_shards
from autopar.plans.parallel_plan import PLAN_VARIABLE, Plan
from autopar.program import MicroProgram, Program
from autopar.questions import (
    CapturedModel,
    as_cluster,
    capture_example,
    capture_model,
    check_model,
    note_branches,
    plan_again,
    plan_program,
)
from autopar.request import LossFunction, Request
from autopar.request.argument_types import Branch, check_arguments
from autopar.request.axis_ways import ContextParallelism, ExpertParallelism
from autopar.request.constraints import Recompute
from autopar.request.expert_load import ExpertLoad
from autopar.request.lossy import Lossy
from autopar.request.offload import Offload
from autopar.request.replicated_experts import ReplicatedExperts
from autopar.request.search_mode import Mode
from autopar.rules.engine import take_rules
from autopar.rules.learning import adopt_rules
from autopar.runtime.consensus import (
    agree_on_fingerprint,
    agree_on_plan,
    attempt_on_all,
    from_first_rank,
    gather_from_all,
)
from autopar.runtime.emit_step import emit_step
from autopar.runtime.guards.beats import PATIENCE
from autopar.runtime.guards.call_guard import CHECK_CALLS
from autopar.runtime.guards.heartbeat import heartbeat_seconds, start_heartbeat
from autopar.runtime.guards.meetings import meet
from autopar.runtime.launchers import join_launched_job
from autopar.runtime.parallel_module import OutputMode, ParallelModule
from autopar.runtime.process_groups import ProcessGroups, processes_of, rank, world_size
from autopar.runtime.step.batches import BatchMode
from autopar.runtime.step.cuda_recorder import CudaRecorder
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.replayed_graphs import Replays
from autopar.runtime.weights.found_weights import find_weights
from autopar.runtime.weights.initial_weights import Sync
from autopar.timing import phase
from autopar.verification import Verification, compare

log = logging.getLogger(__name__)


def compile(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: Any = None,
    cluster: Cluster | str | None = None,
    mesh: Sequence[int] | None = None,
    dims: Mapping[str, int | Sequence[int]] | None = None,
    plan: Plan | str | Path | None = None,
    memory_limit: float | str | None = None,
    constraints: Any = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    batch: BatchMode = "global",
    batch_dims: Mapping[str, int | None] | None = None,
    differentiable: Sequence[str] = (),
    verify: bool = False,
    strict: bool = False,
    discover: bool = False,
    branches: Branch | None = None,
    deterministic: Deterministic = False,
    mode: Mode = "default",
    cache_dir: str | Path | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    recompute: Recompute | None = None,
    offload: Offload | None = None,
    lossy: Lossy | None = None,
    kernels: Sequence[str] | None = None,
    cp: ContextParallelism | None = None,
    ep: ExpertParallelism | None = None,
    expert_load: ExpertLoad | None = None,
    expert_capacity: float | None = None,
    replicated_experts: ReplicatedExperts | None = None,
    time_limit: float | None = None,
    warm_start: Plan | str | Path | None = None,
    scaler: torch.amp.GradScaler | None = None,
    sync: Sync = "broadcast",
    check_calls: int = CHECK_CALLS,
    outputs: OutputMode = "lazy",
    weights: str | Path | None = None,
    cuda_graphs: bool = False,
) -> ParallelModule:
    """Plan `model` for the running processes and return the module that trains under the plan; `model` is consumed.

    Under torchrun, mpirun or srun all processes of the job belong together: where nobody called
    `torch.distributed.init_process_group`, it is called here (`runtime/launchers.py`).

    example_inputs: a tensor (one argument), tuple or list (positional) or dict (keywords), of the *global* shapes,
        fake and meta tensors too; without it the module is planned at its first call.
    loss_fn: `loss_fn(output, batch)` -> 0-dim loss; batch is what the module is called with. Names in a dict batch
        that `forward` does not take go to loss_fn only.
    optimizer: a class or factory (its state is planned for) or an instance (its parameters are exchanged).
    cluster: default: the running processes on this machine. mesh, dims: fix sizes, or named axes (-1 fills); "pp" cuts
        the model into stages: on a number of equal groups, or on groups of the devices that a list gives.
    schedule: the family of the pipeline ("1f1b", "zb-h1", ...); default: the best simulated.
    precision: "bf16" computes in bf16 from fp32 parameters; gradients, their reductions and the loss stay fp32. "fp16"
        does the same in fp16, for a `torch.amp.GradScaler`.
    reduce_dtype: in which gradients are added over ranks and micro-batches: "fp32" also for bf16 parameters (twice
        the bytes, which the plan prices), "bf16" also for fp32 ones under precision="bf16"; default: as computed.
    plan: a Plan or its file, instead of planning; its precision holds where none is given. Default: $AUTOPAR_PLAN.
    batch: "global" (each rank passes all of it) or "local" (its part, see `ParallelModule.data_shard`).
    differentiable: outputs beside the losses whose gradient is wanted, by name ("logits", "1", "hidden_states"); losses
        are the loss and every further 0-dim output. Such a step is not cut into micro-batches or stages.
    verify: compare with the plain model before returning. strict: an operator without a rule is an error.
    discover: look for rules of operators that have none by executing them, on rank 0, in a child process; what is found
        and proven stands in the plan (`plan.discovered`) and is kept on disk.
    branches: "example" captures code that decides by values (`if h.isfinite().all()`, `int(lengths.max())`, `x[mask]`)
        along the way that the example inputs take, which are real then; every call checks that its values decide alike,
        else it is a BranchError with the line, on every rank. Such a step is not cut into micro-batches or stages.
    deterministic: True: equal bits for equal plans and seeds; a number of logical shards of the batch (8): equal bits
        on 1, 2, 4 and 8 processes too, on CPUs, under plans that split the batch alone. Default: as a given plan says.
    mode: how long the planner may search: "fast" (seconds), "default", or "max" (many minutes); see `plan.gap`.
    cache_dir: folder in which plans are kept.
    micro_batches: parts of the batch that a call runs in turn; default: one, or more where memory asks for it.
    recompute: "none", "selective" or "full" in every block; default: as memory asks.
    offload: what may wait in the memory of the host where that of the device is short: "activations", "parameters"
        (with gradients and the optimizer's state, whose step then runs on the host), "all" or "none", the default.
    lossy: to how few bits ("8bit", "4bit", "2bit") what forward saves may be rounded, by chance and with an exact mean,
        where memory is short; "none", the default: nothing is.
    kernels: kinds of groups of operators that run as kernels of ours ("rms_norm", "cross_entropy", ...), (): none;
        default: on GPUs those that cost less.
    cp: how attention runs over an axis `cp` of dims: "ring", "ulysses" or "gather"; default: what costs least. ep: how
        products of experts run over an axis `ep`: "dispatch", "two_level", "gather" or "masked"; default: what costs
        least. Or "capacity", which drops rows: expert_capacity: how many times its even share of a rank's rows an
        expert takes (1.25).
    expert_load: how the rows of mixtures are dealt out to their experts, for prices: "zipf:1.2", a log of `StepLog`
        ("run.jsonl"), or {"layers.*.experts": rows of each}; default: evenly. replicated_experts: of which every rank
        has a copy, where rows travel to the others: how many of the busiest, or {"layers.*.experts": [0, 3]}; default:
        as many as the load makes worth it.
    time_limit: seconds for the whole planning, whatever the mode says. Ctrl-C ends it too: the best plan so far is
        taken, with its bound. warm_start: an older Plan, or its file, to begin with.
    scaler: the GradScaler that scales the loss. Micro-batches and pipelines run backward inside the call: with it they
        run it at that scale, and an overflow on one stage skips the step on all.
    sync: weights and buffers that differ between ranks become those of rank 0 ("broadcast"), or are an error ("check").
    check_calls: ranks compare before every call and backward pass what they do, and the values of the inputs at the
        first calls and at every so-many-th (1: at every call); 0: nothing is compared.
    outputs: an output of which each rank holds a part is gathered when it is first read, by all ranks ("lazy": who
        never reads it pays nothing), or in every call ("gather", which the plan does not price).
    weights: a folder of safetensors files (`from_pretrained`), an index or a file: each rank reads the bytes of its
        blocks. Build the model under `torch.device("meta")`, so that no process ever holds it whole.
    cuda_graphs: record forward and backward on CUDA and replay them; a warning says what is not (`docs/kernels.md`).

    Raises BranchError, ConfigurationError, CaptureError, InfeasibleError, PlanMismatchError, RankMismatchError,
    UnsupportedOperatorError and VerificationError, on every rank.
    """
    check_model(model)
    join_launched_job(PATIENCE["join"] * heartbeat_seconds())
    start_heartbeat()
    if model.training and torch.is_inference_mode_enabled():
        raise ConfigurationError(
            "autopar.compile runs under torch.inference_mode, whose tensors never have a gradient: call it outside, or "
            "model.eval() first where nothing is to be trained"
        )
    check_arguments(plan=plan, batch=batch, verify=verify, scaler=scaler, sync=sync)
    check_arguments(check_calls=check_calls, outputs=outputs, weights=weights, cuda_graphs=cuda_graphs)
    model = take_off_wrappers(model)
    found_weights = find_weights(model, weights)
    chosen = plan if plan is not None else os.environ.get(PLAN_VARIABLE)
    given, running = attempt_on_all(
        lambda: (_as_repeatable(_load(chosen), deterministic), _running_cluster(cluster)), "the cluster"
    )
    if given is not None:
        deterministic = given.deterministic
        precision = given.precision if precision is None else precision
        reduce_dtype = given.reduce_dtype if reduce_dtype is None else reduce_dtype
    request = Request(
        cluster=running,
        loss_fn=loss_fn,
        optimizer=optimizer,
        mesh=mesh,
        dims=dims,
        memory_limit=memory_limit,
        constraints=constraints,
        precision=precision,
        reduce_dtype=reduce_dtype,
        batch_dims=batch_dims,
        differentiable=differentiable,
        strict=strict,
        discover=discover,
        branches=branches,
        deterministic=deterministic,
        mode=mode,
        cache_dir=cache_dir,
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=recompute,
        offload=offload,
        lossy=lossy,
        kernels=kernels,
        cp=cp,
        ep=ep,
        expert_load=expert_load,
        expert_capacity=expert_capacity,
        replicated_experts=replicated_experts,
        time_limit=time_limit,
        warm_start=warm_start,
        with_baselines=dims is None and mesh is None,  # who pins the mesh wants to train, not to compare
    )
    instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    replays = Replays(CudaRecorder(), meet) if cuda_graphs else None
    journey = Journey(request=request, given=given, captures=Captures(), kept=KeptPlans(), replays=replays)
    module = ParallelModule(
        model,
        journey,
        batch=batch,
        optimizer=instance,
        loss_fn=loss_fn,
        precision=precision,
        scaler=scaler,
        sync=sync,
        check_calls=check_calls,
        outputs=outputs,
        weights=found_weights,
        output_rows=output_rows,
    )
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
    dims: Mapping[str, int | Sequence[int]] | None = None,
    memory_limit: float | str | None = None,
    constraints: Any = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    differentiable: Sequence[str] = (),
    strict: bool = False,
    discover: bool = False,
    branches: Branch | None = None,
    deterministic: Deterministic = False,
    mode: Mode = "default",
    cache_dir: str | Path | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    recompute: Recompute | None = None,
    offload: Offload | None = None,
    lossy: Lossy | None = None,
    kernels: Sequence[str] | None = None,
    cp: ContextParallelism | None = None,
    ep: ExpertParallelism | None = None,
    expert_load: ExpertLoad | None = None,
    expert_capacity: float | None = None,
    replicated_experts: ReplicatedExperts | None = None,
    time_limit: float | None = None,
    warm_start: Plan | str | Path | None = None,
    with_baselines: bool = True,
) -> Plan:
    """The best plan of `model` for `cluster`, without processes, devices or weights; arguments as of `compile`.

    cluster: a Cluster, its description ("2x8 H100-SXM") or a file; default: this machine. with_baselines: whether
    known plans are priced beside it; under `dims=` or `mesh=` none of them is taken.
    Raises ConfigurationError, CaptureError, InfeasibleError and UnsupportedOperatorError.
    """
    check_model(model)
    request = Request(
        cluster=as_cluster(cluster),
        loss_fn=loss_fn,
        optimizer=optimizer,
        mesh=mesh,
        dims=dims,
        memory_limit=memory_limit,
        constraints=constraints,
        precision=precision,
        reduce_dtype=reduce_dtype,
        batch_dims=batch_dims,
        differentiable=differentiable,
        strict=strict,
        discover=discover,
        branches=branches,
        deterministic=deterministic,
        mode=mode,
        cache_dir=cache_dir,
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=recompute,
        offload=offload,
        lossy=lossy,
        kernels=kernels,
        cp=cp,
        ep=ep,
        expert_load=expert_load,
        expert_capacity=expert_capacity,
        replicated_experts=replicated_experts,
        time_limit=time_limit,
        warm_start=warm_start,
        with_baselines=with_baselines,
    )
    args, kwargs = normalize_example_inputs(example_inputs)
    with without_wrappers(model) as plain:
        captured = capture_example(plain, args, kwargs, request, Captures())
        return remembering(plan_program(captured.program, request, captured), Source.of(captured))


def verify(
    module_or_model: nn.Module,
    example_inputs: Any,
    *,
    plan: Plan | str | Path | None = None,
    loss_fn: LossFunction | None = None,
    precision: str | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    branches: Branch | None = None,
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
        branches=branches,
    )
    return compare(module, example_inputs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Journey:
    """From a module to the function that this rank runs: for the first inputs, and again for those of another shape.

    given: the plan to run under, where the user has one, or moved to one; captures, kept: those of the
    module so far; replays: whether graphs are recorded; processes: of the plans so far, so that a module which goes to
    and fro makes no communicators anew."""

    request: Request
    given: Plan | None
    captures: Captures
    kept: KeptPlans
    replays: Replays | None = None
    processes: dict[Hashable, ProcessGroups] = field(default_factory=dict)

    def step(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        pinned: Plan | None,
        groups: ProcessGroups | None,
    ) -> Step:
        """As of a `StepMaker`; all ranks call it alike."""
        if self.request.branches is not None:
            self.captures.notes = from_first_rank(
                lambda: note_branches(model, args, kwargs, self.request, self.captures, training=training),
                "the branches of the example",
            )
        captured = attempt_on_all(  # capture, tidy
            lambda: capture_model(model, args, kwargs, self.request, self.captures, training=training), "the capture"
        )
        agree_on_fingerprint(fingerprint(captured.program))
        lowered = self._under_kept_plan(captured) if pinned is not None else None
        if lowered is None:
            lowered = self._planned(captured, pinned)
            self.kept.keep(captured.program, lowered)
        processes = groups or self._processes_of(lowered.plan, _device_type(model))
        with phase("emit", logging.INFO):
            step = emit_step(lowered, processes)
        return step if self.replays is None else self.replays.of(step)

    @property
    def cluster(self) -> Cluster | None:
        """As of a `StepMaker`."""
        return self.request.cluster

    def again(self, step: Step, edited: Plan) -> Step:
        """As of a `StepMaker`; all ranks call it alike."""
        with phase("emit", logging.INFO):
            lowered = _lowered_on_all(step.micro, edited)
            found = emit_step(lowered, step.groups)
        self.kept.forget()
        return found if self.replays is None else self.replays.of(found)

    def under(
        self,
        plan: Plan | str | Path,
        first: Step,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
    ) -> tuple[Journey, Step]:
        """As of a `StepMaker`; all ranks call it alike."""
        given = attempt_on_all(lambda: _as_repeatable(_load(plan), self.request.deterministic), "the plan")
        other = replace(self, given=given, kept=KeptPlans())
        captured = attempt_on_all(
            lambda: capture_model(model, args, kwargs, self.request, self.captures, training=training), "the capture"
        )
        agree_on_fingerprint(fingerprint(captured.program))
        lowered = other._planned(captured, None)
        other.kept.keep(captured.program, lowered)
        processes = self._processes_of(lowered.plan, first.groups.device.type)
        with phase("emit", logging.INFO):
            step = emit_step(lowered, processes)
        return other, step if self.replays is None else self.replays.of(step)

    def _processes_of(self, plan: Plan, device_type: str) -> ProcessGroups:
        """All ranks went through the same plans: where one has them, all do."""
        groups = tuple((group.first_rank, group.shape) for group in plan.rank_groups)
        stages = (plan.layout_mesh.axis_names, groups) if plan.in_stages else None
        key = (device_type, stages or plan.mesh)
        if key not in self.processes:
            self.processes[key] = processes_of(plan, device_type)
        return self.processes[key]

    def _under_kept_plan(self, captured: CapturedModel) -> LoweredStep | None:
        """The step under the plan of another size, where there is one that holds on all ranks."""
        kept = self.kept.nearest(captured.program)
        if kept is None:
            return None
        mark = fingerprint(with_kernels(captured.program, kept.plan.kernels))
        plan = replace(kept.plan, fingerprint=mark)
        found = attempt_on_all(lambda: self._kept_or_why(kept, plan, captured), "the plan of another size")
        whys = gather_from_all("" if isinstance(found, LoweredStep) else str(found), "whether a plan holds")
        refused = next((why for why in whys if why), None)
        if refused is not None or not isinstance(found, LoweredStep):
            log.info("the plan of another size is not kept: %s", refused)
            return None
        return found

    def _kept_or_why(self, kept: KeptPlan, plan: Plan, captured: CapturedModel) -> LoweredStep | PlanMismatchError:
        try:
            with phase("lower", logging.INFO):
                parts = _in_parts(captured.program, plan, captured)
                lowered = step_to_run(parts or captured.program, plan, rank())
                kept.check(lowered, self.request)
            _check_shards(plan, captured)
        except PlanMismatchError as why:
            return why
        return lowered

    def _planned(self, captured: CapturedModel, pinned: Plan | None) -> LoweredStep:
        """The step under the given plan, or under one that is made."""
        chosen = self._plan(captured, pinned)  # enumerate, price, solve
        _agree_on_rules(chosen, captured.program)
        parts = attempt_on_all(lambda: _in_parts(captured.program, chosen, captured), "micro-batches")
        if parts is not None:
            _agree_on_rules(chosen, parts.program)
        if chosen is self.given:
            _check_plan(chosen, captured.program if parts is None else parts.program)
            attempt_on_all(lambda: _check_shards(chosen, captured), "logical shards")
        return _lowered_on_all(parts or captured.program, chosen)

    def _plan(self, captured: CapturedModel, pinned: Plan | None) -> Plan:
        """The given plan, or the one that the first rank makes."""
        if pinned is not None:
            again = pinned
            return Plan.from_json(
                from_first_rank(
                    lambda: plan_again(captured.program, self.request, again, captured).to_json(), "the plan"
                )
            )
        agree_on_plan(self.given)
        if self.given is not None:
            return self.given
        return Plan.from_json(
            from_first_rank(lambda: plan_program(captured.program, self.request, captured).to_json(), "the plan")
        )


def _agree_on_rules(chosen: Plan, program: Program) -> None:
    """Take the rules that were discovered for calls of the program: rank 0 proves those it did not find itself."""
    if chosen.discovered:
        take_rules(from_first_rank(lambda: adopt_rules(program, chosen.discovered), "discovered rules"))


def _in_parts(program: Program, chosen: Plan, recapture: Recapture) -> MicroProgram | None:
    """The program in the micro-batches of the plan; None where that is the whole batch."""
    if chosen.in_one_part:
        return None
    return planned_parts(program, chosen.micro_batches, recapture, kernels=chosen.kernels)


def _check_shards(chosen: Plan, captured: CapturedModel) -> None:
    """Raises PlanMismatchError and ConfigurationError for a given plan that splits more than the batch."""
    if chosen.shards and captured.program.training:
        program = with_kernels(captured.program, chosen.kernels)
        ShardLayouts.of(program, chosen.shards, RecaptureWithKernels(captured, chosen.kernels)).check(chosen)


def realize(program: Program | MicroProgram, chosen: Plan, groups: ProcessGroups) -> Step:
    """The function that this rank runs: the captured program under a plan; all ranks call it alike."""
    return emit_step(_lowered_on_all(program, chosen), groups)


def _lowered_on_all(program: Program | MicroProgram, chosen: Plan) -> LoweredStep:
    with phase("lower", logging.INFO):
        return attempt_on_all(lambda: step_to_run(program, chosen, rank()), "the lowered program")


def _load(plan: Plan | str | Path | None) -> Plan | None:
    return Plan.load(plan) if isinstance(plan, str | Path) else plan


def _as_repeatable(plan: Plan | None, deterministic: Deterministic) -> Plan | None:
    """A given plan with the equal bits that are asked for. Raises PlanMismatchError where it cannot have them."""
    shards = num_shards(deterministic)
    if plan is None or not deterministic or shards == plan.shards != 0:
        return plan
    if shards:
        cut = f"cuts the batch into {plan.shards} logical shards" if plan.shards else "was made without logical shards"
        raise PlanMismatchError(
            f"deterministic={shards}: the plan {cut}: plan again with deterministic={shards}, or ask for equal bits of "
            "equal plans (deterministic=True)"
        )
    return plan if plan.shards else replace(plan, deterministic=True)


def _check_plan(chosen: Plan, program: Program) -> None:
    program = with_kernels(program, chosen.kernels)
    mark = fingerprint(program)
    if chosen.num_ranks != world_size():
        raise PlanMismatchError(
            f"the plan is for {chosen.num_ranks} devices (mesh {chosen.mesh.shape}), {world_size()} processes are "
            f"running: start {chosen.num_ranks} (torchrun --nproc-per-node), or plan again"
        )
    if chosen.fingerprint != mark:
        raise PlanMismatchError(
            f"the plan was made for another graph (fingerprint {chosen.fingerprint[:12]}, this model with these inputs "
            f"has {mark[:12]}): pass the same model configuration, input shapes and loss, or plan again"
        )
    refuse_unknown_names(chosen, program)


def _running_cluster(cluster: Cluster | str | None) -> Cluster:
    chosen = Cluster.detect(world_size()) if cluster is None else as_cluster(cluster)
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
