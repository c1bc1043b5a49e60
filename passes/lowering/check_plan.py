"""Check an operator's entry of a plan against its rule, so that an edited plan fails by name and not by wrong numbers.

    mm "m k, k n -> m n", axes ("m",)     inputs S(0), R -> outputs S(0)         fits
                          axes ("k",)     inputs S(1), S(0) -> outputs P(sum)    fits
                          axes ("k",)     inputs S(1), R -> ...                  PlanMismatchError

Layouts are compared as positions inside the factor that a name stands for, so every spelling of a split fits, and so
does a split of a later part of the factor, if all tensors agree on the part.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

import torch
from torch import fx

from autopar.errors import PlanMismatchError
from autopar.graphs.expert_loads import expert_counts
from autopar.layouts.placement import Layout, Mesh, Partial, Replicate, Shard, format_layout, is_legal
from autopar.layouts.views import cut_positions
from autopar.passes.lowering.placed_experts import order_of_parameters
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION, OperatorPlan
from autopar.program import Program
from autopar.rules.alternatives import alternatives_of, rule_as
from autopar.rules.call import call_of
from autopar.rules.engine import tensor_operands
from autopar.rules.rule import PAIR, Rule, Tensor


def refuse_unknown_names(plan: Plan, program: Program) -> None:
    """Raises PlanMismatchError for an entry of something that the plan's program does not have: what was meant for it
    would be lost."""
    operators = {str(node.meta["operator"]) for node in program.graph.nodes if "operator" in node.meta}
    inputs = {entry.name for entry in program.inputs}
    for kind, names, known in (
        ("parameter", plan.parameters, inputs),
        ("operator", plan.operators, operators),
        ("input", plan.inputs, inputs),
        ("buffer", plan.buffers, inputs),
    ):
        for name in names:
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known - set(names)) or sorted(known), 1, 0.0)
                raise PlanMismatchError(f"{kind}s.{name}: the model has no such {kind}; nearest: {', '.join(near)}")
    experts = expert_counts(program.graph)
    for module, replicated in plan.replicated_experts.items():
        if module not in experts:
            there = ", ".join(experts) or "no module of it"
            raise PlanMismatchError(f"replicated_experts.{module}: the model has no experts there, but in {there}")
        if sorted({*replicated} & {*range(experts[module])}) != list(replicated):
            raise PlanMismatchError(
                f"replicated_experts.{module} is {list(replicated)}: write experts from 0 to {experts[module] - 1} in "
                "order, each once"
            )
    order_of_parameters(plan, program)


class OperatorPlans:
    """The entries of a plan, checked operator by operator; equal calls with equal entries, as layers have, once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._fitting: set[tuple[object, ...]] = set()

    def of(self, node: fx.Node) -> OperatorPlan:
        """The entry of `node`. Raises PlanMismatchError naming the operator and what does not fit."""
        name = node.meta["operator"]
        entry = self._plan.operators.get(name)
        if entry is None:
            raise PlanMismatchError(
                f"the plan has no entry for {name} ({node.target}); it was made for another graph: plan again"
            )
        checked = (call_of(node), entry.implementation, entry.axes, entry.inputs, entry.outputs)
        if checked not in self._fitting:
            _check(self._plan, node, entry)
            self._fitting.add(checked)
        return entry


def _check(plan: Plan, node: fx.Node, entry: OperatorPlan) -> None:
    name = node.meta["operator"]
    shapes = [tuple(operand.meta["val"].shape) for operand in tensor_operands(node)]
    outputs = output_shapes(node)
    _check_counts(name, entry, shapes, outputs, plan.mesh)
    for kind, layouts, sizes in (("input", entry.inputs, shapes), ("output", entry.outputs, outputs)):
        for index, (layout, shape) in enumerate(zip(layouts, sizes, strict=True)):
            if shape is not None and not (_has_axes(layout, plan.mesh) and is_legal(shape, layout, plan.mesh)):
                raise PlanMismatchError(
                    f"{name}: {kind} {index} of shape {list(shape)} cannot lie as {format_layout(layout)} on mesh "
                    f"{plan.mesh.shape}; edit the plan or plan again"
                )
    _check_rule(name, _rule(name, node, entry), entry, shapes, outputs, plan.mesh)


def _rule(name: str, node: fx.Node, entry: OperatorPlan) -> Rule | None:
    """The rule by which an operator runs. Raises PlanMismatchError for an implementation that it does not have."""
    try:
        return rule_as(node, entry.implementation)
    except KeyError:
        known = (DEFAULT_IMPLEMENTATION, *(way.name for way in alternatives_of(node)))
        raise PlanMismatchError(
            f"{name}: {call_of(node).text} does not run as {entry.implementation!r}; it runs as {' or '.join(known)}"
        ) from None


def output_shapes(node: fx.Node) -> list[tuple[int, ...] | None]:
    """Global shape of every output, None for one that is no tensor."""
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    return [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in values]


def _has_axes(layout: Layout, mesh: Mesh) -> bool:
    return len(layout) == len(mesh.shape)


def _check_counts(
    name: str, entry: OperatorPlan, inputs: Sequence[object], outputs: Sequence[object], mesh: Mesh
) -> None:
    for kind, given, needed in (
        ("inputs", len(entry.inputs), len(inputs)),
        ("outputs", len(entry.outputs), len(outputs)),
        ("axes", len(entry.axes), len(mesh.shape)),
    ):
        if given != needed:
            raise PlanMismatchError(f"{name}: the plan gives {given} {kind}, the operator has {needed}; plan again")


def _check_rule(
    name: str,
    rule: Rule | None,
    entry: OperatorPlan,
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...] | None],
    mesh: Mesh,
) -> None:
    for axis, choice in enumerate(entry.axes):
        problem = _axis_problem(rule, axis, choice, entry, inputs, outputs, mesh)
        if problem:
            inputs_text = [format_layout(layout) for layout in entry.inputs]
            outputs_text = [format_layout(layout) for layout in entry.outputs]
            raise PlanMismatchError(
                f"{name}: on axis {mesh.axis_names[axis]!r} ({choice or 'replicated'}) {problem}; the plan has inputs "
                f"{inputs_text}, outputs {outputs_text}"
            )


def _axis_problem(
    rule: Rule | None,
    axis: int,
    choice: str | None,
    entry: OperatorPlan,
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...] | None],
    mesh: Mesh,
) -> str | None:
    """What one axis does that the rule does not allow, or None."""
    before = [layout[axis] for layout in entry.inputs]
    after = [layout[axis] for layout, shape in zip(entry.outputs, outputs, strict=True) if shape is not None]
    if mesh.shape[axis] == 1:
        return None
    if choice is None:
        return None if all(p == Replicate() for p in (*before, *after)) else "every layout must be R"
    if rule is None:
        return "the operator has no rule, so it must be replicated"
    if choice == "partial":
        marks = tuple(isinstance(p, Partial) for p in before)
        linear = all(p in (Replicate(), Partial()) for p in before) and all(p == Partial() for p in after)
        return None if marks in rule.linear and linear else _linear_in(rule)
    if choice in rule.pairs:
        return _pair_problem(rule, axis, choice, entry, inputs, outputs, mesh)
    if choice not in rule.names:
        return f"the operator has only the names {[*rule.names, *rule.pairs]}"
    return _split_problem(rule, axis, choice, entry, inputs, outputs, mesh)


def _linear_in(rule: Rule) -> str:
    """Through which operands partial sums may pass."""
    if not rule.linear:
        return "no partial sums may pass: the operator is linear in none of its inputs"
    ways = [" and ".join(f"input {i}" for i, marked in enumerate(marks) if marked) for marks in rule.linear]
    return f"partial sums pass through {' or '.join(ways)}, with every output P(sum) and the other inputs R"


def _split_problem(
    rule: Rule,
    axis: int,
    choice: str,
    entry: OperatorPlan,
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...] | None],
    mesh: Mesh,
) -> str | None:
    tensors = [("input", i, dims, entry.inputs[i], inputs[i], None) for i, dims in enumerate(rule.inputs)]
    left = rule.reductions.get(choice, (None,) * len(outputs))
    for index, (dims, shape) in enumerate(zip(rule.outputs, outputs, strict=True)):
        if dims is not None and shape is not None:
            tensors.append(("output", index, dims, entry.outputs[index], shape, left[index]))  # type: ignore[arg-type]
    parts = set()
    for kind, index, dims, layout, shape, reduction in tensors:
        dim = next((d for d, names in enumerate(dims) if choice in names), None)
        if dim is None:
            wanted = Replicate() if reduction is None else Partial(reduction)
            if layout[axis] != wanted:
                return f"{kind} {index} must be {wanted}, not {layout[axis]}"
            continue
        part = _part(rule, choice, dims, dim, layout, axis, shape, mesh)
        if part is None:
            return f"{kind} {index} must be split along {choice!r} of dim {dim}, not {layout[axis]}"
        parts.add(part)
    return None if len(parts) <= 1 else f"the tensors split different parts of {choice!r}"


def _pair_problem(
    rule: Rule,
    axis: int,
    choice: str,
    entry: OperatorPlan,
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...] | None],
    mesh: Mesh,
) -> str | None:
    """As `_split_problem`, of an axis that splits two names; no tensor has both."""
    tensors = [("input", i, *found) for i, found in enumerate(zip(rule.inputs, entry.inputs, inputs, strict=True))]
    tensors += [
        ("output", i, dims, layout, shape)
        for i, (dims, layout, shape) in enumerate(zip(rule.outputs, entry.outputs, outputs, strict=True))
        if dims is not None and shape is not None
    ]
    parts: dict[str, set[int]] = {name: set() for name in choice.split(PAIR)}
    _, beside = parts
    behind = [(mesh.axis_names[i], mesh.shape[i]) for i, name in enumerate(entry.axes) if i > axis and name == beside]
    if alone := [name for name, size in behind if size > 1]:
        return f"axis {alone[0]!r} behind it must not split {beside!r} alone: its ranks would hold ranges apart"
    for kind, index, dims, layout, shape in tensors:
        name, dim = next((n, d) for n in parts for d, names in enumerate(dims) if n in names)
        part = _part(rule, name, dims, dim, layout, axis, shape, mesh)
        if part is None:
            return f"{kind} {index} must be split along {name!r} of dim {dim}, not {layout[axis]}"
        parts[name].add(part)
    apart = [name for name, found in parts.items() if len(found) > 1]
    return f"the tensors split different parts of {apart[0]!r}" if apart else None


def _part(
    rule: Rule, choice: str, dims: Tensor, dim: int, layout: Layout, axis: int, shape: tuple[int, ...], mesh: Mesh
) -> int | None:
    """Where inside the factor `choice` the axis cuts, None if it does not."""
    placement = layout[axis]
    if not isinstance(placement, Shard) or placement.dim != dim:
        return None
    in_front = math.prod(_factor_size(rule, dims[dim], name, shape[dim]) for name in _names_before(dims[dim], choice))
    position = cut_positions(layout, dim, mesh.shape)[axis]
    offset, remainder = divmod(position, in_front)
    return offset if remainder == 0 and 1 <= offset < rule.sizes[choice] else None


def _names_before(names: Sequence[str | None], choice: str) -> Sequence[str | None]:
    return names[: names.index(choice)]


def _factor_size(rule: Rule, names: Sequence[str | None], name: str | None, size: int) -> int:
    """Size of one factor of a dim; a whole factor (None) takes what the names leave."""
    if name is not None:
        return rule.sizes[name]
    return size // math.prod(rule.sizes[other] for other in names if other is not None)
