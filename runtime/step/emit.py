"""Emit: one rank's forward and backward graph -> one differentiable function.

    step = emit(program, lowered, partition, plan, groups)
    outputs = step(leaves, bind, held, axes=(), local=False)      # `.backward()` runs the backward graph

The symbolic groups of collectives ("dp_shard+tp") become names of process groups, the graphs become modules run as
they are ("eager") or compiled ("inductor"), and both meet in one `torch.autograd.Function` whose saved tensors are
exactly those that the partition returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from autopar._compat import LazyGraphModule, release_saved_tensors
from autopar.graphs.graph_copies import copied
from autopar.layouts.placement import Layout, replicated
from autopar.passes.lowering.stage import LoweredStep
from autopar.plans.parallel_plan import Plan
from autopar.program import Input, Output, Program
from autopar.runtime.kernels import GraphCall, kernels
from autopar.runtime.parameters import StageParameters, from_local
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.accumulation import CutBackward, HeldGradients
from autopar.runtime.step.emitted_step import Bind


def group_symbols(*graph_modules: fx.GraphModule) -> set[str]:
    """The symbolic groups that the collectives of the graphs name."""
    return {symbol for module in graph_modules for node in module.graph.nodes if (symbol := _symbol(node))}


def _symbol(node: fx.Node) -> str | None:
    if node.op != "call_function" or getattr(node.target, "namespace", None) != "_c10d_functional":
        return None
    last = node.args[-1]
    return last if isinstance(last, str) else None


def bind_groups(graph_module: fx.GraphModule, groups: ProcessGroups) -> fx.GraphModule:
    """A copy of the graph whose collectives name real process groups.

    all_reduce(x, "sum", "dp_shard+tp")   -->   all_reduce(x, "sum", "7")
    """
    graph = copied(graph_module.graph)
    for node in graph.nodes:
        symbol = _symbol(node)
        if symbol is not None:
            node.args = (*node.args[:-1], groups.name(symbol))
    return LazyGraphModule(graph_module, graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """The `Step` that runs the whole batch at once."""

    program: Program
    lowered: Program
    plan: Plan
    groups: ProcessGroups
    forward: GraphCall
    backward: GraphCall | None
    cut: CutBackward | None
    """The backward graph without its last reductions, for `no_sync()`."""

    @property
    def whole(self) -> Program:
        """What this runs."""
        return self.program

    @property
    def own_plan(self) -> Plan:
        """Every rank goes by the whole plan."""
        return self.plan

    @property
    def stage_parameters(self) -> StageParameters:
        """Every rank holds its block of every parameter."""
        return StageParameters()

    @property
    def forward_outputs(self) -> tuple[Output, ...]:
        """Mutations, loss and outputs: what the forward graph returns before the saved tensors."""
        return tuple(output for output in self.lowered.outputs if output.role != "gradient")

    def __call__(
        self,
        leaves: Sequence[Any],
        bind: Bind,
        held: HeldGradients,
        *,
        axes: Sequence[int],
        local: bool,
        loss_scale: float | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """As `Step` says; nothing is cut and backward runs when it is asked for, so the rest says nothing here."""
        tensors = bind(leaves)
        if self.backward is None or not torch.is_grad_enabled():
            returned = self.forward([local_tensor(tensor) for tensor in tensors])
            return tuple(returned[: len(self.forward_outputs)])
        results: tuple[torch.Tensor, ...] = _StepFunction.apply(self, held, *tensors)  # type: ignore[no-untyped-call]
        return results


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The block of a DTensor on this rank, without autograd; other tensors as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _StepFunction(torch.autograd.Function):
    """Forward graph and backward graph as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, step: WholeStep, held: HeldGradients, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        returned = step.forward([local_tensor(tensor) for tensor in tensors])
        count = len(step.forward_outputs)
        results, saved = returned[:count], returned[count:]
        ctx.step = step
        ctx.held = held
        ctx.save_for_backward(*(value for value in saved if isinstance(value, torch.Tensor)))
        ctx.constants = [None if isinstance(value, torch.Tensor) else value for value in saved]
        inputs = {id(local_tensor(tensor)) for tensor in tensors}
        results = tuple(value.clone() if id(value) in inputs else value for value in results)
        ctx.mark_non_differentiable(*_without_tangent(step, results))
        ctx.set_materialize_grads(False)  # no zeros for outputs whose tangent nothing reads
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        step: WholeStep = ctx.step
        assert step.backward is not None
        by_name = {
            output.name: tangent
            for tangent, output in zip(tangents, step.forward_outputs, strict=True)
            if output.role != "mutation"
        }
        arguments = _saved(ctx)
        arguments += [_tangent(by_name[value.name], value, step.groups.device) for value in tangents_of(step.lowered)]
        held: HeldGradients = ctx.held
        if step.cut is not None and (held.holding or held.cut is not None):
            return (None, None, *_by_input(step, held.backward(step.cut, arguments)))
        return (None, None, *_by_input(step, step.backward(arguments)))


def _saved(ctx: Any) -> list[Any]:
    """What forward saved, and nothing else holds it any more: each value ends with its last reader in backward."""
    tensors = iter(ctx.saved_tensors)
    saved = [next(tensors) if constant is None else constant for constant in ctx.constants]
    release_saved_tensors(ctx)
    return saved


def _tangent(given: torch.Tensor | None, meaning: Input, device: torch.device) -> torch.Tensor:
    """The local block of a tangent, zeros where the caller differentiates other outputs only."""
    if given is None:
        return torch.zeros(meaning.shape, dtype=meaning.dtype, device=device)
    return given.contiguous()


def tangents_of(program: Program) -> list[Input]:
    """The tangent inputs, in their order."""
    return [value for value in program.inputs if value.role == "tangent"]


def _without_tangent(step: WholeStep, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    names = {value.name for value in tangents_of(step.lowered)}
    return [
        value
        for value, output in zip(results, step.forward_outputs, strict=True)
        if output.role == "mutation" or output.name not in names
    ]


def _by_input(step: WholeStep, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """One gradient per non-tangent input, None where there is none; parameters get DTensors in their layout."""
    outputs = [output for output in step.lowered.outputs if output.role == "gradient"]
    by_name = {output.name: value for output, value in zip(outputs, gradients, strict=True)}
    shapes = parameter_shapes(step.program)
    return [
        as_gradient(shapes, step.plan, step.groups, value.name, by_name.get(value.name))
        if value.role == "parameter"
        else by_name.get(value.name)
        if value.role == "input"
        else None
        for value in step.lowered.inputs
        if value.role != "tangent"
    ]


def parameter_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """The global shape of every parameter."""
    return {value.name: value.shape for value in program.inputs if value.role == "parameter"}


def as_gradient(
    shapes: Mapping[str, tuple[int, ...]], plan: Plan, groups: ProcessGroups, name: str, gradient: torch.Tensor | None
) -> torch.Tensor | None:
    """The gradient of the parameter `name` as a DTensor in its layout, from the local block."""
    return None if gradient is None else from_local(gradient, shapes[name], plan.parameters[name].stored, groups)


def output_layout(plan: Plan, name: str) -> Layout:
    """Layout of the output `name`; replicated where the plan says nothing."""
    return plan.outputs.get(name, replicated(len(plan.layout_mesh.shape)))


def emit(lowered: LoweredStep, groups: ProcessGroups) -> WholeStep:
    """Bind the graphs of the whole batch to processes and kernels."""
    stage, backend = lowered.only, lowered.plan.kernel_backend
    parts = stage.partition.graphs
    groups.create(group_symbols(*parts))
    calls = [kernels(bind_groups(part, groups), backend=backend) for part in parts]
    cut = None
    if stage.late is not None:
        cut = CutBackward(
            unreduced=kernels(bind_groups(stage.late.unreduced, groups), backend=backend),
            reduce=kernels(bind_groups(stage.late.reduce, groups), backend=backend),
            positions=stage.late.positions,
        )
    return WholeStep(
        program=lowered.program,
        lowered=stage.program,
        plan=lowered.plan,
        groups=groups,
        forward=calls[0],
        backward=calls[1] if len(calls) > 1 else None,
        cut=cut,
    )
