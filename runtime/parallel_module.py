"""ParallelModule: the compiled model, an `nn.Module` that trains like the original.

    module = autopar.compile(model, example, optimizer=torch.optim.AdamW)
    loss = module(**batch)               # plain 0-dim tensor, the global value
    loss.backward()                      # every parameter's .grad is a reduced DTensor in the parameter's layout

It takes over the module tree of the original, so names, types of submodules, tied weights and buffers stay; only the
parameters became DTensors, on several processes. The graph of a new input shape, of eval mode or of another Python
state (`module.alpha = 2`) is built when it is first met, with the parameters' layouts kept. An attribute that this
class does not have is the original's, for reading and for writing. Graphs that were not used for long are dropped
(`step/kept_steps.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from autopar._compat import TreeSpec, keep_dynamo_out, tree_leaves, tree_map_only
from autopar.capture import autocast_state
from autopar.errors import ConfigurationError
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request.expert_load import ExpertLoad
from autopar.runtime.collectives.progress import HERE
from autopar.runtime.consensus import from_first_rank, shared_seed
from autopar.runtime.guards.branch_guards import check_branches
from autopar.runtime.guards.call_guard import CHECK_CALLS
from autopar.runtime.guards.module_tree import ModuleTree
from autopar.runtime.guards.spread_values import read_whole_values
from autopar.runtime.guards.state_of_calls import StateOfCalls
from autopar.runtime.guards.strided_chunks import checkpoint_strided_blocks
from autopar.runtime.module_calls import ModuleCalls
from autopar.runtime.process_groups import world_size
from autopar.runtime.step import batches
from autopar.runtime.step.accumulation import HeldGradients
from autopar.runtime.step.batches import BatchMode, Signature
from autopar.runtime.step.call_values import Handing, graph_inputs, graph_states, user_output, write_buffers
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.kept_steps import LEAST_BOUND, KeptSteps, most_graphs
from autopar.runtime.step.later_backward import RepeatedCall, may_be_trained, with_later_backward
from autopar.runtime.step.length_hint import LengthHint
from autopar.runtime.step.repeatable import repeatable
from autopar.runtime.step.step_maker import StepMaker
from autopar.runtime.weights.found_weights import FoundWeights
from autopar.runtime.weights.initial_weights import Sync
from autopar.runtime.weights.move_schedule import MovedState
from autopar.runtime.weights.moved_experts import move_experts, plan_for
from autopar.runtime.weights.moved_state import StateMover
from autopar.runtime.weights.planned_model import PlannedModel
from autopar.runtime.weights.shard_model import shard_model, shard_state
from autopar.runtime.weights.whole_weights import without_weights
from autopar.young_garbage import young_garbage_only

_STEP_STRIDE = 1_000_003  # a prime: seeds of neighbouring steps differ in many bits once hashed by global index
_SEED_BITS = 63

LossFunction = Callable[[Any, Any], torch.Tensor]
OutputMode: TypeAlias = Literal["lazy", "gather"]
"""When an output that lies across ranks is gathered: when it is first read, or in every call."""


def _no_rows(_: Program) -> Mapping[str, int]:
    return {}


class ParallelModule(PlannedModel):
    """See the module docstring. Made by `autopar.compile`; `model` is consumed."""

    def __init__(
        self,
        model: nn.Module,
        maker: StepMaker,
        *,
        batch: BatchMode = "global",
        optimizer: torch.optim.Optimizer | None = None,
        loss_fn: LossFunction | None = None,
        precision: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        sync: Sync = "broadcast",
        check_calls: int = CHECK_CALLS,
        outputs: OutputMode = "lazy",
        weights: FoundWeights | None = None,
        output_rows: Callable[[Program], Mapping[str, int]] = _no_rows,
    ) -> None:
        """output_rows: which dim of each output holds the samples, for batch="local"; other arguments are those of
        `autopar.compile`."""
        super().__init__()
        self._maker = maker
        self._batch = batch
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._precision = precision
        self._scaler = scaler
        self._sync: Sync = sync
        self._weights = weights
        self._steps = KeptSteps(LEAST_BOUND)
        self._lengths = LengthHint()
        self._absent: dict[str, nn.Parameter] = {}
        self._first: Step | None = None
        self._example: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._data_axes: tuple[int, ...] = ()
        self._held = HeldGradients()
        self._check_calls = check_calls
        self._outputs = outputs
        self._output_rows = output_rows
        self._rows: dict[tuple[str, ...], Mapping[str, int]] = {}
        self._trains_in_eval = False
        self._compared: ModuleCalls | None = None
        self.base_seed = 0
        self.calls = 0
        self._python = StateOfCalls(model, loss_fn)
        self._tree: ModuleTree | None = None
        keep_dynamo_out(ParallelModule)
        self._hold(model)

    # what was planned

    def split_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """(args, kwargs, batch): what forward of the original takes and what the loss function gets."""
        args, kwargs = batches.route(self.original, args, dict(kwargs), self.loss_fn is not None)
        batch = kwargs.pop("batch", None) if self.loss_fn is not None else None
        return args, kwargs, (kwargs or args) if batch is None else batch

    @property
    def loss_fn(self) -> LossFunction | None:
        """What `autopar.compile` was given."""
        return self._loss_fn

    @property
    def precision(self) -> str | None:
        """What `autopar.compile` was given, or the plan says."""
        return self._precision

    def data_shard(self) -> tuple[int, int]:
        """(index, count): this rank's part of the global batch, of `count` parts."""
        return batches.data_shard(self._planned().groups, self._data_axes)

    def build_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan and emit for arguments of global shapes, and take over the parameters of the model."""
        with HERE.inside("compile"):
            self._build_for(args, kwargs)

    def _build_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        training = self._wants_backward([*args, *kwargs.values()])
        step = self._maker.step(self.original, args, kwargs, training=training, pinned=None, groups=None)
        self._example = tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        self._run_by(step, self._axes_of_the_batch(step))
        self._adopt(step)
        self._begin(step)

    def _run_by(self, step: Step, axes: tuple[int, ...]) -> None:
        """axes: those of the batch."""
        self._first, self._data_axes = step, axes
        self._is_local = self._batch == "local" and self.data_shard()[1] > 1

    def _begin(self, step: Step) -> None:
        """Keep the first graph of a plan, behind the tree that it needs."""
        args, kwargs = self._example
        args, kwargs = batches.route(self.original, args, kwargs, self.loss_fn is not None)
        leaves, spec = batches.ordered(args, kwargs, step.program)
        self._steps = KeptSteps(from_first_rank(lambda: most_graphs(step.program), "how many graphs are kept"))
        self._keep(step, self._kind(leaves, spec))
        self._compared = ModuleCalls(self, step, self._data_axes, self._python, self._check_calls)

    def _axes_of_the_batch(self, step: Step) -> tuple[int, ...]:
        """The mesh axes over which the ranks share the samples; none where stages share them differently."""
        if not step.plan.staged.groups:
            return batches.data_axes(step.own_plan, step.program)
        if self._batch == "local":
            raise ConfigurationError(
                'batch="local" needs stages that share the samples alike; those of this plan stand on unequal rank '
                'groups: pass the whole batch on every rank (batch="global")'
            )
        return ()

    def _adopt(self, step: Step) -> None:
        """Move the module tree of the original here, sharded as the plan says."""
        model = self.original
        self.base_seed = shared_seed()
        self._absent = shard_model(model, step, self._optimizer, self.base_seed, self._sync, self._weights)
        self._hold(model)
        if world_size() > 1:
            read_whole_values()
            checkpoint_strided_blocks()
        self._tree = ModuleTree(model)
        self.register_load_state_dict_pre_hook(_shard_loaded)  # type: ignore[no-untyped-call]

    def place_experts(
        self, asked: Plan | ExpertLoad, optimizer: torch.optim.Optimizer | None = None
    ) -> Mapping[str, int]:
        """Place experts by another load from the next step on: weights, gradients and states of the optimizer of those
        that lie elsewhere then go to their new ranks, in place; all ranks call it between two steps.

        asked: a load, as `expert_load=` of `autopar.compile` takes it ("run.jsonl", a log of `StepLog`): the plan stays
        but for `expert_order`; or such an edit of the plan. optimizer: whose states go along; default: that of
        `autopar.compile`. Returns by parameter how many experts came to this rank; `module.plan` is the edited plan.
        Raises ConfigurationError and PlanMismatchError, before anything moves, for plans that are no such edit, experts
        that cannot be placed, and states that do not say where they lie.
        """
        first = self._planned()
        self._refuse_unreduced("place_experts")
        with HERE.inside("place_experts"):
            self._meet_before("placing experts")
            edited = Plan.from_json(
                from_first_rank(lambda: plan_for(first.plan, first.whole, asked).to_json(), "the edited plan")
            )
            step = self._maker.again(first, edited)
            moved = move_experts(self.original, optimizer or self._optimizer, first, step)
        self._first = step
        self._steps.renew(step)
        return moved

    def replan(self, plan: Plan | str | Path, optimizer: torch.optim.Optimizer | None = None) -> MovedState:
        """Go on under another plan for the same processes: parameters, gradients, buffers and states of the optimizer
        travel between ranks in memory, and the next call runs under the plan; all ranks call it between two steps.

        plan: a Plan or its file, made for this model, these inputs and the mode in which the module is (after
        `module.eval()` one of a forward pass alone). optimizer: whose states go along; default: that of
        `autopar.compile`. Parameters stay the objects that they are; with stages a rank gets some and loses others, in
        the optimizer, too. Raises ConfigurationError and PlanMismatchError, before anything moves, for plans that do
        not fit, gradients that wait in `no_sync`, and states that do not say where they lie.
        """
        first = self._planned()
        self._refuse_unreduced("replan")
        with HERE.inside("replan"):
            self._meet_before("moving to another plan")
            args, kwargs = self._example
            training = self._wants_backward([*args, *kwargs.values()])
            skeleton = without_weights(self.original, self.training, self._absent)
            maker, step = self._maker.under(plan, first, skeleton, args, kwargs, training=training)
            axes = self._axes_of_the_batch(step)
            mover = StateMover(self.original, self._absent, optimizer or self._optimizer, step)
            self._absent, moved = mover.move(maker.cluster)
            self._maker, self._tree = maker, ModuleTree(self.original)
            self._run_by(step, axes)
            self._begin(step)
        return moved

    def _refuse_unreduced(self, act: str) -> None:
        if self._held.cut is not None:
            raise ConfigurationError(f"{act}: gradients of no_sync() wait for their sum; run a backward outside")

    # running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled model; see `autopar.compile` for what comes back."""
        if self._first is None:
            self._plan_at_first_call(args, kwargs)
        return self._run(args, kwargs, self._batch)

    def run_global(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As a call in which every rank passes the whole batch, whatever the module's batch mode is."""
        return self._run(args, kwargs, "global")

    def step_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Step, list[Any]]:
        """The emitted graph for arguments of global shapes, and the arguments as its leaves."""
        args, kwargs = batches.route(self.original, args, kwargs, self.loss_fn is not None)
        leaves, spec = batches.ordered(args, kwargs, self._planned().program)
        return self._step_for(leaves, spec, self._kind(leaves, spec)), leaves

    def seed(self) -> int:
        """Seed of the random draws of the next call."""
        return (self.base_seed + self.calls * _STEP_STRIDE) % (1 << _SEED_BITS)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: BatchMode) -> Any:
        with HERE.inside("call", self.calls + 1):
            return self._run_inside(args, kwargs, mode)

    def _run_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any], mode: BatchMode) -> Any:
        args, kwargs = batches.route(self.original, args, kwargs, self.loss_fn is not None)
        leaves, spec = batches.ordered(args, kwargs, self._planned().program)
        assert self._compared is not None
        kind = self._kind(leaves, spec)
        call, whole = self._compared.begin(self.calls + 1, leaves, spec, (mode, kind))
        step = self._step_for(whole, spec, self._kind(whole, spec) if call.split else kind)
        results = self._results(step, leaves, mode, self.seed())
        if may_be_trained(step, (*super().parameters(), *self._absent.values())):
            results = with_later_backward(results, self._again(leaves, whole, spec, mode))
        check_branches(step.program.guards, step.forward_outputs, results, call.act)
        self.calls += 1
        self._compared.meet_before_backward(results, call.act, self._held)
        write_buffers(self.original, step, results)
        return user_output(step, results, self._handing(step.whole, call.act, mode))

    def _handing(self, program: Program, act: str, mode: BatchMode) -> Handing:
        """How a call called `act` hands out what `program` returns."""
        gathers = self._outputs == "gather"
        if mode == "global" or not self._data_axes:
            return Handing(act=act, gathers=gathers)
        names = tuple(output.name for output in program.outputs if output.role == "output")
        if names not in self._rows:
            self._rows[names] = self._output_rows(program)
        return Handing(act=act, gathers=gathers, axes=self._data_axes, batch_dims=self._rows[names])

    def _meet_before(self, act: str) -> None:
        if self._compared is not None and not self._planned().plan.in_stages:
            self._compared.meet(f"{act} behind call {self.calls}")

    def _again(self, leaves: list[Any], whole: list[Any], spec: TreeSpec, mode: BatchMode) -> RepeatedCall:
        """The call that is made now, for a backward pass that it has not."""
        seed = self.seed()

        def run() -> tuple[torch.Tensor, ...]:
            self._trains_in_eval = True
            return self._results(self._step_for(whole, spec, self._kind(whole, spec)), leaves, mode, seed)

        return RepeatedCall(self.named_parameters(), lambda: self._state_of(whole, spec), run)

    def _state_of(self, leaves: list[Any], spec: TreeSpec) -> Hashable:
        """What a graph is made for, but for its backward pass."""
        kind = (*self._kind(leaves, spec)[:-1], False)
        return kind, self._python.digest(kind)

    def _results(self, step: Step, leaves: list[Any], mode: BatchMode, seed: int) -> tuple[torch.Tensor, ...]:
        states = graph_states(self.original, step, seed)
        split_axes = self._data_axes if mode == "local" else ()

        def bind(part: Sequence[Any]) -> list[torch.Tensor]:
            return graph_inputs(step, part, states, split_axes)

        scale = self._scaler.get_scale() if self._scaler is not None and self._scaler.is_enabled() else None
        autocast = torch.autocast(step.groups.device.type, enabled=False)
        with repeatable(step.plan.deterministic), autocast:  # its casts are part of the graph
            return step(leaves, bind, self._held, axes=self._data_axes, local=mode == "local", loss_scale=scale)

    def _plan_at_first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._batch == "local" and world_size() > 1:
            raise ConfigurationError(
                'batch="local" needs example_inputs of the global shapes: which part of the batch is local is only '
                "known once the model is planned"
            )
        self.build_for(args, kwargs)

    def _kind(self, leaves: list[Any], spec: TreeSpec) -> Signature:
        """All of a graph's key but the Python state. Raises ConfigurationError where the module has other tensors."""
        assert self._tree is not None
        if self._tree.changed():
            self._python.read_again()
        form = batches.signature(leaves, spec)
        return (form, *self._tree.modes(), autocast_state(), self._wants_backward(leaves))

    def _keep(self, step: Step, kind: Signature) -> None:
        """Take a new graph for calls of a kind, in the Python state of now."""
        self._python.captured(kind, step.whole.reads)
        self._steps.keep((*kind, self._python.digest(kind)), step)

    def _step_for(self, leaves: list[Any], spec: TreeSpec, kind: Signature) -> Step:
        """The emitted graph for arguments of global shapes like these, a call of this kind; built now where they, or
        the Python state, are new."""
        step = self._steps.find((*kind, self._python.digest(kind)))
        if step is None:
            first = self._planned()
            args, kwargs = spec.unflatten(leaves)
            began = time.perf_counter()
            with young_garbage_only():
                skeleton, training = without_weights(self.original, self.training, self._absent), kind[-1]
                step = self._maker.step(
                    skeleton, args, kwargs, training=training, pinned=first.plan, groups=first.groups
                )
            self._keep(step, kind)
            self._lengths.made(step.whole, time.perf_counter() - began)
        return step

    def _wants_backward(self, leaves: Any) -> bool:
        """In eval mode too, where an argument wants its gradient, or where the model was trained in it before."""
        if self.training or (self._trains_in_eval and torch.is_grad_enabled()):
            return True
        return any(batches.wants_gradient(leaf) for leaf in tree_leaves(leaves))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside stay unreduced; the next backward outside reduces their sum.

        Only reductions that stand at the end of a gradient wait; others run as always. `.grad` is complete after
        the first backward outside.
        """
        before, self._held.holding = self._held.holding, True
        try:
            yield
        finally:
            self._held.holding = before


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Shape, dtype and whether its gradient is wanted."""
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def _shard_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, ParallelModule)
    shard_state(module, module._planned(), state, prefix, module.absent)

