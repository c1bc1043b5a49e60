"""LocalContext: what the local form of one operator depends on: the node, its plan, and where the rank stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.layouts.placement import Mesh, local_runs, local_shape, local_start
from autopar.plans.plan_value import OperatorPlan
from autopar.rules.alternatives import target_as
from autopar.rules.call import argument_slot

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalContext:
    """node: the captured node, with global shapes in meta["val"]; graph: where calls are appended; seed: the int64
    tensor from which random operators draw (None in programs without any)."""

    node: fx.Node
    plan: OperatorPlan
    mesh: Mesh
    coordinate: tuple[int, ...]
    graph: fx.Graph
    seed: fx.Node | None

    def argument(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
        """The value of argument `name` in a call with `args` and `kwargs`."""
        if name in kwargs:
            return kwargs[name]
        position, default = argument_slot(self.node.target, name)
        return args[position] if position < len(args) else default

    def global_argument(self, name: str) -> Any:
        """The value of argument `name` in the captured call; tensors as their captured nodes."""
        return self.argument(self.node.args, self.node.kwargs, name)

    def global_output(self, index: int = 0) -> torch.Tensor:
        """The fake tensor of one output."""
        value = self.node.meta["val"]
        output = value[index] if isinstance(value, tuple | list) else value
        assert isinstance(output, torch.Tensor)
        return output

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of one output."""
        shape = tuple(self.global_output(index).shape)
        return local_shape(shape, self.plan.outputs[index], self.mesh, self.coordinate)

    def input_shape(self, index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Local shape of a tensor operand of global `shape`."""
        return local_shape(shape, self.plan.inputs[index], self.mesh, self.coordinate)

    def input_start(self, index: int, dim: int, size: int) -> int:
        """First global index along a dim (of global `size`) of a tensor operand."""
        return local_start(size, self.plan.inputs[index], dim, self.mesh, self.coordinate)

    def output_start(self, index: int, dim: int) -> int:
        """First global index along a dim of one output."""
        size = self.global_output(index).shape[dim]
        return local_start(size, self.plan.outputs[index], dim, self.mesh, self.coordinate)

    def output_runs(self, index: int = 0) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per dim of one output, the runs of global indices that this rank holds."""
        layout = self.plan.outputs[index]
        shape = self.global_output(index).shape
        return tuple(local_runs(size, layout, dim, self.mesh, self.coordinate) for dim, size in enumerate(shape))

    def axes_of(self, names: frozenset[str]) -> tuple[int, ...]:
        """Mesh axes that split one of the names."""
        return tuple(axis for axis, name in enumerate(self.plan.axes) if name in names)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call."""
        return self.graph.call_function(target, args, kwargs)

    def call_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Append a call of the operator, by the alternative that the plan names."""
        return self.graph.call_function(target_as(self.node, self.plan.implementation), args, kwargs)

    def describe(
        self,
        node: fx.Node,
        shape: tuple[int, ...] | tuple[tuple[int, ...], ...],
        dtype: torch.dtype | tuple[torch.dtype, ...],
    ) -> fx.Node:
        """Write the meta of an intermediate node of local `shape`; of several outputs, those of each."""
        node.meta.update(
            local_shape=shape,
            dtype=dtype,
            phase=self.node.meta.get("phase", "forward"),
            operator=self.node.meta.get("operator", self.node.name),
        )
        return node

    def all_reduce(self, value: fx.Node, axes: tuple[int, ...], op: str = "sum") -> fx.Node:
        """Reduction of a described node over mesh axes; returns the waited result."""
        return self._collective(_c10d.all_reduce.default, value, (op,), axes, value.meta["local_shape"])

    def all_to_all(self, rows: fx.Node, received: list[int], sent: list[int], axes: tuple[int, ...]) -> fx.Node:
        """`sent[i]` rows (dim 0) of a described node to rank i of the group over `axes`, `received[i]` from it."""
        shape = (sum(received), *rows.meta["local_shape"][1:])
        return self._collective(_c10d.all_to_all_single.default, rows, (received, sent), axes, shape)

    def shifted(
        self, rows: fx.Node, sent: int, received: int, position: int, by: int, axes: tuple[int, ...]
    ) -> fx.Node:
        """`sent` rows (dim 0) of a described node to the rank that stands `by` places further in the ring over `axes`,
        in which this one has `position`, `received` rows from the one as many before it. The call that starts it: see
        `waited`."""
        ranks = math.prod(self.mesh.shape[axis] for axis in axes)
        to, of = [0] * ranks, [0] * ranks
        to[(position + by) % ranks], of[(position - by) % ranks] = sent, received
        shape = (received, *rows.meta["local_shape"][1:])
        return self._started(_c10d.all_to_all_single.default, rows, (of, to), axes, shape)

    def waited(self, started: fx.Node) -> fx.Node:
        """What a started collective brings."""
        return self.describe(
            self.call(_c10d.wait_tensor.default, started), started.meta["local_shape"], started.meta["dtype"]
        )

    def _collective(
        self, target: Any, value: fx.Node, arguments: tuple[Any, ...], axes: tuple[int, ...], shape: tuple[int, ...]
    ) -> fx.Node:
        """The waited result; the value itself where no axis has a second device."""
        if all(self.mesh.shape[axis] == 1 for axis in axes):
            return value
        return self.waited(self._started(target, value, arguments, axes, shape))

    def _started(
        self, target: Any, value: fx.Node, arguments: tuple[Any, ...], axes: tuple[int, ...], shape: tuple[int, ...]
    ) -> fx.Node:
        names = tuple(self.mesh.axis_names[axis] for axis in axes if self.mesh.shape[axis] > 1)
        started = self.describe(self.call(target, value, *arguments, "+".join(names)), shape, value.meta["dtype"])
        started.meta["group_axes"] = names
        return started


def replace_argument(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with argument `name` set to `value`."""
    position, _ = argument_slot(target, name)
    if name in kwargs or position >= len(args):
        return args, {**kwargs, name: value}
    return (*args[:position], value, *args[position + 1 :]), dict(kwargs)
