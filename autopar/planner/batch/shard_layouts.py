"""Shard layouts: where every tensor of a step lies when ranks split the batch and nothing else.

    samples      split along the batch            averaged     a partial sum, one part per rank
    fixed        whole on every rank; what element-wise operators do to parameters may be split as these are

Then an operator sees one logical shard, whatever the number of ranks, and sums over shards are the last thing that
happens to a gradient, so that they can be taken in one order (`plans/logical_shards.py`). Parameters, gradients and
outputs may lie as they like. `batch_flow.py` says which value is what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import ConfigurationError, PlanMismatchError
from autopar.layouts.placement import Layout, Mesh, Partial, Placement, Replicate, Shard
from autopar.layouts.views import canonical
from autopar.planner.batch.batch_flow import BatchFlow, Flow, Kind, NotSeparable
from autopar.planner.batch.micro_batch_program import Recapture, flow_in_parts
from autopar.planner.problem.factorisation import Factorisation, Value, value_of
from autopar.planner.problem.graph_operators import operators
from autopar.plans.parallel_plan import Plan
from autopar.program import Program, batch_size
from autopar.rules.engine import tensor_operands

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLayout:
    """Placements of the operands and outputs of one operator on the axis of the batch; None: whole or split."""

    inputs: tuple[Placement | None, ...]
    outputs: tuple[Placement | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardLayouts:
    """Of every operator of a program whose batch is cut into `count` logical shards, by its name."""

    count: int
    operators: Mapping[str, OperatorLayout]

    @staticmethod
    def of(
        whole: Program, count: int, recapture: Recapture, factorisation: Factorisation | None = None
    ) -> ShardLayouts:
        """Raises ConfigurationError with the operator and the reason where shards do not add up to the whole."""
        try:
            flow = flow_in_parts(whole, count, recapture, factorisation or Factorisation(whole))
        except NotSeparable as reason:
            raise ConfigurationError(
                f"deterministic={count}: a batch of {batch_size(whole)} cannot be computed in {count} logical shards: "
                f"{reason}; deterministic=True asks for equal bits of equal plans"
            ) from reason
        return ShardLayouts(count=count, operators={_name(node): _layout_of(node, flow) for node in operators(whole)})

    def check(self, plan: Plan) -> None:
        """Raise PlanMismatchError for the first operator by which a plan splits more than the batch."""
        axis = axis_of_batch(plan.mesh)
        if axis is None:
            return
        for name, operator in plan.operators.items():
            asked = self.operators.get(name)
            if asked is None:
                continue
            lie, wanted = (*operator.inputs, *operator.outputs), (*asked.inputs, *asked.outputs)
            for layout, placement in zip(lie, wanted, strict=True):
                if not lies_so(layout, placement, axis, plan.mesh):
                    raise PlanMismatchError(
                        f"deterministic={self.count}: {name} has a tensor that lies {layout[axis]} on "
                        f"{plan.mesh.axis_names[axis]}, and {placement or 'R or S'} where the batch alone is split, "
                        "which equal bits on any number of processes need: plan again with deterministic="
                        f"{self.count}, or write true there (equal bits of equal plans)"
                    )


def axis_of_batch(mesh: Mesh) -> int | None:
    """The axis over which a plan in logical shards splits the batch; None on one device."""
    return next((axis for axis, size in enumerate(mesh.shape) if size > 1), None)


def _name(node: fx.Node) -> str:
    return str(node.meta["operator"])


def _layout_of(node: fx.Node, flow: BatchFlow) -> OperatorLayout:
    operands = [value_of(operand) for operand in tensor_operands(node)]
    flows = [flow.read(value, node) for value in operands]
    may_be_split = _is_elementwise(node) and all(each.kind is Kind.FIXED for each in flows)
    outputs = [value for value in ((node, index) for index in range(_num_outputs(node))) if value in flow.flows]
    return OperatorLayout(
        inputs=tuple(_placement(v, f, flow, may_be_split) for v, f in zip(operands, flows, strict=True)),
        outputs=tuple(_placement(value, flow.flows[value], flow, may_be_split) for value in outputs),
    )


def _placement(value: Value, found: Flow, flow: BatchFlow, may_be_split: bool) -> Placement | None:
    if found.kind is Kind.SAMPLES:
        return Shard(*flow.batch_place(value))
    if found.kind is Kind.AVERAGED:
        return Partial("sum")
    return None if may_be_split else Replicate()


def _is_elementwise(node: fx.Node) -> bool:
    return node.target is _aten._to_copy.default or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _num_outputs(node: fx.Node) -> int:
    value = node.meta["val"]
    return len(value) if isinstance(value, tuple | list) else 1


def lies_so(layout: Layout, placement: Placement | None, axis: int, mesh: Mesh) -> bool:
    """Whether a layout has on an axis what is asked of a tensor there."""
    if placement is None:
        return not isinstance(layout[axis], Partial)
    wanted = tuple(placement if other == axis else Replicate() for other in range(len(mesh.shape)))
    return layout[axis] == canonical((), wanted, mesh.shape)[axis]
