"""Plans written by hand for tests, and their execution on simulated ranks beside the plain module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.graphs.forward_backward import Partition
from autopar.graphs.node_values import is_getitem
from autopar.layouts.placement import Layout, Mesh, Partial, Placement, Replicate, Shard, is_legal, replicated
from autopar.passes.lowering.check_plan import output_shapes
from autopar.passes.lowering.step_halves import split_forward_backward
from autopar.passes.overlap.in_symmetric_memory import Groups, both_in_symmetric_memory
from autopar.passes.overlap.overlapped import WHOLE, overlapped
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import OperatorPlan, ParameterPlan, Prediction
from autopar.program import Program
from autopar.rules.engine import is_view, rule_for, tensor_operands
from autopar.rules.rule import PAIR, Rule
from autopar.rules.rule import Tensor as Dims
from tests.passes.local_blocks import assemble, distribute
from tests.passes.lowered_programs import lower
from tests.simulated_ranks import run_ranks

Pick = Callable[[fx.Node, Rule], Sequence[str | None]]


def operator_entry(node: fx.Node, axes: Sequence[str | None], mesh: Mesh) -> OperatorPlan | None:
    """The layouts that the rule gives for the picked names; None if they are not legal for the shapes."""
    rule = rule_for(node)
    shapes = [tuple(operand.meta["val"].shape) for operand in tensor_operands(node)]
    outputs = output_shapes(node)
    if rule is None or all(name is None for name in axes):
        everywhere = replicated(len(mesh.shape))
        return OperatorPlan(
            axes=(None,) * len(mesh.shape), inputs=(everywhere,) * len(shapes), outputs=(everywhere,) * len(outputs)
        )
    inputs = [tuple(_placement(rule, dims, name, None) for name in axes) for dims in rule.inputs]
    results = []
    for index, dims in enumerate(rule.outputs):
        left = [rule.reductions.get(name or "", (None,) * len(outputs))[index] for name in axes]
        results.append(
            replicated(len(axes))
            if dims is None
            else tuple(_placement(rule, dims, name, op) for name, op in zip(axes, left, strict=True))
        )
    legal = all(is_legal(s, layout, mesh) for s, layout in zip(shapes, inputs, strict=True))
    legal = legal and all(s is None or is_legal(s, layout, mesh) for s, layout in zip(outputs, results, strict=True))
    return OperatorPlan(axes=tuple(axes), inputs=tuple(inputs), outputs=tuple(results)) if legal else None


def _placement(rule: Rule, dims: Dims, name: str | None, reduction: str | None) -> Placement:
    for dim, names in enumerate(dims):
        here = next((part for part in (name or "").split(PAIR) if part in names), None)
        if here is not None:
            before = names[: names.index(here)]
            return Shard(dim, math.prod(rule.sizes[other] for other in before if other is not None))
    return Replicate() if reduction is None else Partial(reduction)


def calls(program: Program) -> list[fx.Node]:
    """The nodes that need an entry."""
    return [n for n in program.graph.nodes if n.op == "call_function" and not is_view(n) and not is_getitem(n)]


def hand_plan(
    program: Program,
    mesh: Mesh,
    operators: Mapping[str, OperatorPlan],
    parameters: Mapping[str, ParameterPlan] | None = None,
    inputs: Mapping[str, Layout] | None = None,
) -> Plan:
    """A plan with these operators; everything not named is replicated."""
    everywhere = replicated(len(mesh.shape))
    entries = {node.meta["operator"]: operator_entry(node, (None,) * len(mesh.shape), mesh) for node in calls(program)}
    known = {
        i.name: ParameterPlan(stored=everywhere, used=everywhere, gradient=everywhere)
        for i in program.inputs
        if i.role == "parameter"
    }
    return Plan(
        mesh=mesh,
        parameters={**known, **(parameters or {})},
        operators={**entries, **operators},  # type: ignore[arg-type]
        inputs={i.name: everywhere for i in program.inputs if i.role == "input"} | dict(inputs or {}),
        buffers={i.name: everywhere for i in program.inputs if i.role == "buffer"},
        outputs={o.name: everywhere for o in program.outputs if o.role in ("loss", "output")},
        predicted=Prediction(step_seconds=0.0, peak_bytes=0.0),
        objective_seconds=0.0,
        bound_seconds=0.0,
        gap=0.0,
        fingerprint="",
        cluster="",
        profile="",
    )


def picked(program: Program, mesh: Mesh, pick: Pick) -> dict[str, OperatorPlan]:
    """Entries of the operators for which `pick(node, rule)` gives names that are legal."""
    found = {}
    for node in calls(program):
        rule = rule_for(node)
        if rule is not None:
            entry = operator_entry(node, tuple(pick(node, rule)), mesh)
            if entry is not None:
                found[node.meta["operator"]] = entry
    return found


@dataclass
class Results:
    """Values of one step, assembled from all ranks."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    partitions: list[Partition] = field(default_factory=list)


def run_plan(
    program: Program,
    plan: Plan,
    tensors: Mapping[str, Tensor],
    recompute: Sequence[str] = (),
    change: Callable[[fx.GraphModule], None] | None = None,
    bucket_bytes: Mapping[str, float] | None = None,
    chunks: Mapping[str, int] = WHOLE,
    symmetric: Groups = MappingProxyType({}),
) -> Results:
    """Lower for every rank, run forward and backward in simulation. tensors: global value of every input by name;
    bucket_bytes: run what `overlapped` makes of the graphs; chunks: with products in so many chunks; symmetric: those
    of such groups in symmetric memory."""
    mesh = plan.mesh
    lowered = [lower(program, plan, rank) for rank in range(mesh.size)]
    partitions = [split_forward_backward(each, recompute, plan.recomputed_at) for each in lowered]
    if symmetric:
        partitions = [both_in_symmetric_memory(partition, symmetric) for partition in partitions]
    if bucket_bytes is not None:
        partitions = [overlapped(partition, bucket_bytes, chunks) for partition in partitions]
    for partition in partitions if change else ():
        for part in (partition.forward, partition.backward):
            change(part)
            part.recompile()
    blocks: list[list[Tensor]] = [[] for _ in range(mesh.size)]
    for meaning in lowered[0].inputs:
        if meaning.role == "tangent":
            continue
        for rank, block in enumerate(
            distribute(tensors[meaning.name], _stored(plan, meaning.role, meaning.name), mesh)
        ):
            blocks[rank].append(block)
    returned = run_ranks([p.forward for p in partitions], blocks, mesh)
    count = sum(o.role != "gradient" for o in program.outputs)
    tangents = [torch.ones(i.shape, dtype=i.dtype) for i in program.inputs if i.role == "tangent"]
    backward_inputs = [[*values[count:], *tangents] for values in returned]
    gradients = run_ranks([p.backward for p in partitions], backward_inputs, mesh) if program.training else []
    return _assembled(program, plan, returned, gradients, partitions)


def _stored(plan: Plan, role: str, name: str) -> Layout:
    if role == "parameter":
        return plan.parameters[name].stored
    known = plan.buffers if role == "buffer" else plan.inputs
    return known.get(name, replicated(len(plan.mesh.shape)))


def _assembled(program: Program, plan: Plan, returned: Any, gradients: Any, partitions: Any) -> Results:
    results = Results({}, {}, partitions)
    shapes = {i.name: i.shape for i in program.inputs}
    forward = [o for o in program.outputs if o.role != "gradient"]
    backward = [o for o in program.outputs if o.role == "gradient"]
    nodes = dict(zip([(o.role, o.name) for o in program.outputs], program.returned, strict=True))
    for position, output in enumerate(forward):
        shape = tuple(nodes[output.role, output.name].meta["val"].shape)
        layout = plan.outputs.get(output.name) or _stored(plan, "buffer", output.name)
        results.outputs[output.name] = assemble([values[position] for values in returned], shape, layout, plan.mesh)
    for position, output in enumerate(backward):
        values = [each[position] for each in gradients]
        if values and values[0] is not None:
            layout = _stored(plan, "parameter" if output.name in plan.parameters else "input", output.name)
            results.gradients[output.name] = assemble(values, shapes[output.name], layout, plan.mesh)
    return results


def worst(found: Results, wanted: Results) -> float:
    """The largest relative difference of the loss and of any gradient."""
    assert set(found.gradients) == set(wanted.gradients)
    pairs = [(found.outputs[name], wanted.outputs[name]) for name in wanted.outputs]
    pairs += [(found.gradients[name], wanted.gradients[name]) for name in wanted.gradients]
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def tensors_of(program: Program, module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Global value of every input of the program by name."""
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {
        i.name: state[i.name].detach() if i.name in state else inputs[i.name]
        for i in program.inputs
        if i.role not in ("tangent", "seed")
    } | {"seed": torch.tensor(7)}
