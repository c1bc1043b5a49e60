"""One step of one rank as it is emitted, on fake CUDA tensors and a fake process group.

    run_rank(program, plan, torch.optim.AdamW, rank=3)      ->  Record: calls, storages, what the lowered graphs say

The graphs are those that `emit_step` binds, called as the runtime calls them: forward, then backward with what forward
saved; behind them the optimizer steps, which did so once before. Outside of autograd, in which fake CUDA tensors abort
on a machine without CUDA. Every value of a graph ends where the emitted code drops it. A plan for inductor runs node by
node: kernels that inductor fuses hold less between them, and the predicted memory counts nodes too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar._compat import LazyGraphModule
from autopar.graphs.graph_copies import copied
from autopar.passes.lowering.chain import step_to_run
from autopar.passes.lowering.stage import LoweredStep
from autopar.plans.parallel_plan import Plan
from autopar.program import Input, MicroProgram, Program
from autopar.runtime import emit_step
from autopar.runtime.kernels.named_calls import NamedGraph
from autopar.runtime.pipeline.parts_step import PartsStep
from autopar.runtime.process_groups import ProcessGroups, StageProcesses
from autopar.runtime.step import symmetric_memory
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.whole_step import WholeStep, tangents_of
from benchmarks.fake_cuda.record import Call, Recorder, Storage, Turn
from benchmarks.fake_cuda.tensors import fake_cuda

DEVICE = torch.device("cuda", 0)
LOWERED = "lowered"
"""Key in the meta of an emitted node: the node of the lowered graph that it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a step did. lowered: the step that ran; resident_bytes: parameters of this rank, their optimizer's state;
    step_end: number of the first call of the optimizer."""

    lowered: LoweredStep
    calls: Sequence[Call]
    turns: Sequence[Turn]
    storages: Sequence[Storage]
    resident_bytes: int
    step_end: int

    def place(self, turn: int | None) -> str:
        """The operator of a turn, as the plan names it."""
        if turn is None:
            return "the step"
        node = self.turns[turn].node
        return str(node.meta.get("operator", node.name))

    def live_bytes(self) -> list[int]:
        """Bytes of everything at every call, one more behind the last."""
        change = [0] * (len(self.calls) + 2)
        for storage in self.storages:
            change[storage.born] += storage.bytes
            change[len(self.calls) + 1 if storage.ended is None else storage.ended] -= storage.bytes
        return list(accumulate(change[:-1]))

    @property
    def step_bytes(self) -> int:
        """Most bytes of forward and backward, beside what is resident."""
        return max(self.live_bytes()[: self.step_end + 1]) - self.resident_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes at once."""
        return max(self.live_bytes())


def run_rank(
    program: Program | MicroProgram, plan: Plan, optimizer: type[torch.optim.Optimizer], rank: int = 0
) -> Record:
    """Run the step of a rank. program: as of `lowered_step`; plan: for CUDA devices; optimizer: of torch, updates all
    parameters in one call and keeps its counters on the device."""
    eager = replace(plan, kernel_backend="eager")
    lowered = step_to_run(program, eager, rank)
    for graph in graphs_of(lowered):
        for node in graph.nodes:
            node.meta[LOWERED] = node  # copies keep it
    mapped: list[int] = []
    with _world(plan.num_ranks, rank):
        with mock.patch.object(symmetric_memory, "map_symmetric_memory", lambda group, nbytes: mapped.append(nbytes)):
            step = emit_step.emit_step(lowered, _groups(eager))
        with fake_cuda():
            return _recorded(step, lowered, optimizer, mapped)


def _recorded(
    step: Step, lowered: LoweredStep, optimizer: type[torch.optim.Optimizer], mapped: Sequence[int]
) -> Record:
    """mapped: bytes of symmetric memory, one number a group, that live throughout."""
    inputs = [value for value in step.bound_inputs if value.role == "parameter"]
    parameters = {
        value.name: nn.Parameter(_made(value), requires_grad=value.dtype.is_floating_point) for value in inputs
    }
    here = {value.name for value in inputs if not value.on_host}  # the others' optimizer steps on the host
    trained = [parameters[o.name] for o in step.lowered.outputs if o.role == "gradient" and o.name in here]
    updates = _first_update(optimizer, trained)
    if isinstance(step, PartsStep):  # routes are worked out at the first step
        for message in step.orders[True]:
            step.pieces(message)
    recorder = Recorder()
    for tensor in (*parameters.values(), *_tensors_of(updates)):
        recorder.meet(tensor)
    resident = sum(storage.bytes for storage in recorder.storages)
    symmetric = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in mapped]
    for tensor in symmetric:
        recorder.meet(tensor)
    with _marked(recorder), recorder:
        results, gradients = _run(step, {name: parameter.detach() for name, parameter in parameters.items()})
        step_end = len(recorder.calls)
        for name, gradient in gradients.items():
            if name in here:
                parameters[name].grad = gradient.to(parameters[name].dtype)
        if updates is not None:
            updates.step()
    storages = [replace(storage) for storage in recorder.storages]
    del results, symmetric
    return Record(
        lowered=lowered,
        calls=recorder.calls,
        turns=recorder.turns,
        storages=storages,
        resident_bytes=resident,
        step_end=step_end,
    )


def _first_update(optimizer: type[torch.optim.Optimizer], trained: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer behind a step, so that its state is there; None where nothing is trained."""
    if not trained:
        return None
    options: dict[str, Any] = {"foreach": True, "capturable": True}
    updates = optimizer(trained, **options)
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    updates.step()
    updates.zero_grad()
    return updates


def _tensors_of(updates: torch.optim.Optimizer | None) -> Iterator[Tensor]:
    for state in {} if updates is None else updates.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _run(step: Step, parameters: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Results and gradients by name. parameters: by name."""

    def bound(part: int) -> list[Tensor]:
        return [parameters[v.name] if v.role == "parameter" else _made(v) for v in step.bound_inputs]

    if not isinstance(step, WholeStep):
        assert isinstance(step, PartsStep)
        return step.results_and_gradients(bound, (), None)
    returned = list(step.forward(bound(0)))
    count = len(step.forward_outputs)
    results, saved = returned[:count], returned[count:]
    del returned
    if step.backward is None:
        return results, {}
    saved += [_made(value) for value in tangents_of(step.lowered)]
    names = [output.name for output in step.lowered.outputs if output.role == "gradient"]
    found = zip(names, step.backward(saved), strict=True)
    return results, {name: gradient for name, gradient in found if gradient is not None}


def graphs_of(lowered: LoweredStep) -> list[fx.Graph]:
    """All graphs that the rank may run."""
    found = [module.graph for stage in lowered.stages for module in stage.graphs.values()]
    return found if lowered.statistics_graph is None else [*found, lowered.statistics_graph.graph]


def _made(value: Input) -> Tensor:
    return torch.empty(tuple(value.shape), dtype=value.dtype, device="cpu" if value.on_host else DEVICE)


def _groups(plan: Plan) -> ProcessGroups:
    groups = StageProcesses(plan, "cpu") if plan.in_stages else ProcessGroups(plan.mesh, "cpu")
    groups.device = DEVICE
    return groups


@dataclass(frozen=True, slots=True)
class _Sent:
    """The work of a send, which has left by the time that somebody asks; that of a fake one never ends."""

    work: Any

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        self.work.wait()


@contextmanager
def _world(size: int, rank: int) -> Iterator[None]:
    """This process is one of `size`; the others say what it says, and take at once what is sent to them."""
    if size == 1:
        yield
        return

    def gathered(found: list[Any], value: Any, *_: Any) -> None:
        found[:] = [value] * size

    send = dist.isend

    def sent(*arguments: Any, **keywords: Any) -> _Sent:
        return _Sent(send(*arguments, **keywords))

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "all_gather_object", gathered),
            mock.patch.object(dist, "isend", sent),
            mock.patch.object(emit_step, "from_first_rank", lambda action: action()),
        ):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _marked(recorder: Recorder) -> Iterator[None]:
    """While active, the operators of emitted graphs tell the recorder which node they are."""
    made: dict[fx.GraphModule, fx.GraphModule] = {}

    def call(graph: NamedGraph, arguments: list[Any]) -> Any:
        module = graph.graph_module
        if module not in made:
            made[module] = with_marks(module, recorder)
        return made[module](arguments)

    with mock.patch.object(NamedGraph, "__call__", call):
        yield


def with_marks(graph_module: fx.GraphModule, recorder: Recorder) -> fx.GraphModule:
    """A copy of an emitted graph whose nodes say so when they run."""
    graph = copied(graph_module.graph)
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _told(node, node.target, recorder)
        elif node.op == "call_method" and node.target != "pop":
            node.op, node.target = "call_function", _told(node, _method(str(node.target)), recorder)
    return LazyGraphModule(graph_module, graph)


def _told(node: fx.Node, target: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    return lambda *arguments, **keywords: recorder.run(node.meta.get(LOWERED, node), target, arguments, keywords)


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *arguments, **keywords: getattr(value, name)(*arguments, **keywords)
