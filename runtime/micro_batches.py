"""Micro-batches: one call of the module as several runs of one emitted step, forward and backward in turn.

    loss = module(batch)       for every part: forward, backward into the totals; loss = sum of the parts' losses
    loss.backward()            hands out the totals times the incoming gradient of the loss

Only one part's activations live at a time. The gradient of a loss is linear in the tangent, so loss scaling, clipping
and accumulation over calls work as ever. Where ranks share the samples, micro-batch i takes the i-th piece of the
samples of every rank, so that a rank needs nothing of another's:

    batch 0..7 on 2 ranks, 2 micro-batches     rank 0: (0 1) (2 3)     rank 1: (4 5) (6 7)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.errors import ConfigurationError
from autopar.layout import Replicate, Shard
from autopar.parallel_plan import Plan
from autopar.passes.micro_batches import MicroPartition, drawing_for
from autopar.program import Joined, MicroProgram, Output, Program
from autopar.runtime.accumulation import HeldGradients
from autopar.runtime.batches import input_leaves
from autopar.runtime.emit import as_gradient, bind_groups, group_symbols, local_tensor, output_layout
from autopar.runtime.kernels import GraphCall, kernels
from autopar.runtime.parameters import from_local, local_block, to_torch
from autopar.runtime.process_groups import ProcessGroups, rank
from autopar.runtime.step import Bind

BindPart = Callable[[int], list[torch.Tensor]]
"""Micro-batch -> what `Bind` gives for its leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePart:
    """What runs for one part."""

    statistics: GraphCall | None
    forward: GraphCall
    backward: GraphCall | None


@dataclass(slots=True, kw_only=True, eq=False)
class PartGraphs:
    """The bound graphs; where they draw random numbers, every part runs its own copy."""

    statistics: fx.GraphModule | None
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    micro: MicroProgram
    backend: str
    _made: dict[tuple[int, int], OnePart] = field(default_factory=dict)

    def of(self, part: int, pieces: int) -> OnePart:
        """The graphs of one part, compiled at the first use. pieces: see `drawing_for`."""
        key = (part, pieces) if self.micro.draws else (0, 1)
        if key not in self._made:
            self._made[key] = OnePart(
                statistics=None if self.statistics is None else self._call(self.statistics, *key),
                forward=self._call(self.forward, *key),
                backward=None if self.backward is None else self._call(self.backward, *key),
            )
        return self._made[key]

    def _call(self, graph: fx.GraphModule, part: int, pieces: int) -> GraphCall:
        if self.micro.draws:
            graph = drawing_for(graph, self.micro.draws, part, self.micro.count, pieces)
        return kernels(graph, backend=self.backend)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """The `Step` that runs the batch in parts; `program` and `lowered` are those of one part."""

    micro: MicroProgram
    lowered: Program
    plan: Plan
    groups: ProcessGroups
    graphs: PartGraphs
    totals: tuple[int, ...]

    @property
    def program(self) -> Program:
        return self.micro.program

    @property
    def whole(self) -> Program:
        return self.micro.whole

    @property
    def count(self) -> int:
        return self.micro.count

    @property
    def forward_outputs(self) -> tuple[Output, ...]:
        """Loss and outputs of the whole: what a call returns."""
        return tuple(output for output in self.lowered.outputs if output.role in ("loss", "output"))

    def __call__(
        self, leaves: Sequence[Any], bind: Bind, held: HeldGradients, *, axes: Sequence[int], local: bool
    ) -> tuple[torch.Tensor, ...]:
        """As `Step` says. Raises ConfigurationError where local parts do not split."""
        part_of = self.split(axes, local)

        def bound(part: int) -> list[torch.Tensor]:
            return bind(part_of(leaves, part))

        if self.graphs.backward is None or not torch.is_grad_enabled():
            return self._run(bound, axes, None)
        parameters = [tensor for tensor, value in zip(bound(0), self._bound, strict=True) if value.role == "parameter"]
        results: tuple[torch.Tensor, ...] = _MicroFunction.apply(self, held, bound, axes, *parameters)  # type: ignore[no-untyped-call]
        return results

    @property
    def _bound(self) -> list[Any]:
        return [value for value in self.lowered.inputs if value.role not in ("tangent", "statistic")]

    def run_with_gradients(
        self, bind: BindPart, axes: Sequence[int]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """(results, one complete gradient of the loss per gradient of the program)."""
        gradients = [output for output in self.lowered.outputs if output.role == "gradient"]
        returned = self.lowered.returned[len(self.lowered.outputs) - len(gradients) :]
        totals: list[torch.Tensor | None] = [None] * len(gradients)
        for index in self.totals:
            node = returned[index]
            totals[index] = torch.zeros(node.meta["local_shape"], dtype=node.meta["dtype"], device=self.groups.device)
        return self._run(bind, axes, totals), totals

    def _run(
        self, bind: BindPart, axes: Sequence[int], totals: list[torch.Tensor | None] | None
    ) -> tuple[torch.Tensor, ...]:
        pieces = self.pieces(axes)
        statistics = self._statistics(bind, pieces)
        results: list[list[torch.Tensor]] = [[] for _ in self.forward_outputs]
        for part in range(self.count):
            graphs = self.graphs.of(part, pieces)
            returned = list(graphs.forward(self._arguments(bind(part), statistics)))
            for kept in results:
                kept.append(returned.pop(0))
            if totals is not None:
                self._backward(graphs, returned, totals)
            del returned
        return tuple(
            self._join(output, values, axes) for output, values in zip(self.forward_outputs, results, strict=True)
        )

    def _backward(self, graphs: OnePart, saved: list[Any], totals: Sequence[torch.Tensor | None]) -> None:
        assert graphs.backward is not None
        tangents = [
            torch.full(value.shape, self.micro.loss_scale, dtype=value.dtype, device=self.groups.device)
            for value in self.lowered.inputs
            if value.role == "tangent"
        ]
        saved += [*tangents, *(totals[index] for index in self.totals)]
        graphs.backward(saved)  # empties the list: each saved value ends with its last reader

    def _statistics(self, bind: BindPart, pieces: int) -> dict[str, torch.Tensor]:
        """The statistics of the whole batch, by name."""
        if self.graphs.statistics is None:
            return {}
        names = [output.name for output in self.lowered.outputs if output.role == "statistic"]
        blank = {
            value.name: torch.zeros(value.shape, dtype=value.dtype, device=self.groups.device)
            for value in self.lowered.inputs
            if value.role == "statistic"
        }
        sums: list[torch.Tensor] = []
        for part in range(self.count):
            compute = self.graphs.of(part, pieces).statistics
            assert compute is not None
            found = compute(self._arguments(bind(part), blank))
            sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else list(found)
        return {
            name: _scaled(value, self.micro.statistic_scales[name]) for name, value in zip(names, sums, strict=True)
        }

    def _arguments(self, bound: Sequence[torch.Tensor], statistics: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        remaining = map(local_tensor, bound)
        return [
            statistics[value.name] if value.role == "statistic" else next(remaining)
            for value in self.lowered.inputs
            if value.role != "tangent"
        ]

    # outputs of the whole

    def _join(self, output: Output, values: list[torch.Tensor], axes: Sequence[int]) -> torch.Tensor:
        """The local block of an output of the whole batch, from those of the parts."""
        joined: Joined = self.micro.joined[output.name]
        if joined.dim is not None:
            return self._concatenated(output.name, joined.dim, values, axes)
        if joined.scale is None:
            return values[0].clone()
        return _scaled(torch.stack(values).sum(0, dtype=values[0].dtype), joined.scale)

    def _concatenated(self, name: str, dim: int, values: list[torch.Tensor], axes: Sequence[int]) -> torch.Tensor:
        layout = output_layout(self.plan, name)
        pieces = self.pieces(axes)
        split = tuple(axis for axis, placement in enumerate(layout) if placement == Shard(dim))
        if split == tuple(axes) and pieces > 1:
            return torch.cat(values, dim)
        gathered = tuple(Replicate() if placement == Shard(dim) else placement for placement in layout)
        if split:
            values = [self._gathered(name, value, gathered) for value in values]
        whole = _in_order(torch.cat(values, dim), dim, self.count, pieces)
        if not split:
            return whole
        only = tuple(placement if placement == Shard(dim) else Replicate() for placement in layout)
        return local_block(whole, only, self.groups.mesh, rank()).contiguous()

    def _gathered(self, name: str, value: torch.Tensor, layout: Any) -> torch.Tensor:
        index = next(i for i, output in enumerate(self.program.outputs) if output.name == name)
        shape = self.program.returned[index].meta["val"].shape
        tensor = from_local(value, shape, output_layout(self.plan, name), self.groups)
        return tensor.redistribute(placements=to_torch(layout, self.groups.mesh)).to_local()

    # inputs of a part

    def pieces(self, axes: Sequence[int]) -> int:
        """Into how many parts the axes split the batch, where every micro-batch takes a piece of each; else 1."""
        parts = math.prod(self.plan.mesh.shape[axis] for axis in axes)
        sizes = [e.shape[e.batch_dim] for e in self.program.inputs if e.role == "input" and e.batch_dim is not None]
        return parts if all(size % parts == 0 for size in sizes) else 1

    def split(self, axes: Sequence[int], local: bool) -> Callable[[Sequence[Any], int], list[Any]]:
        """A function (arguments of a call, micro-batch) -> the arguments of that micro-batch.

        axes: over which the ranks share the samples; local: each rank passes its part of the batch, not the whole.
        Raises ConfigurationError where local parts do not split.
        """
        pieces = self.pieces(axes)
        if local:
            parts = math.prod(self.plan.mesh.shape[axis] for axis in axes)
            if pieces != parts:
                raise ConfigurationError(
                    f'with batch="local" and {self.count} micro-batches the batch must be a multiple of '
                    f"{self.count * parts}; pass such a batch, or micro_batches=1"
                )
            pieces = 1
        dims = {leaf: value.batch_dim for value, leaf in input_leaves(self.program) if value.batch_dim is not None}

        def part_of(leaves: Sequence[Any], part: int) -> list[Any]:
            return [
                leaf if index not in dims else self._samples(leaf, dims[index], part, pieces)
                for index, leaf in enumerate(leaves)
            ]

        return part_of

    def _samples(self, argument: torch.Tensor, dim: int, part: int, pieces: int) -> torch.Tensor:
        """The samples of micro-batch `part` of an argument that holds `pieces` parts of the batch."""
        shape = argument.shape
        cut = argument.reshape(*shape[:dim], pieces, self.count, -1, *shape[dim + 1 :])
        return cut.select(dim + 1, part).flatten(dim, dim + 1)


def _in_order(value: torch.Tensor, dim: int, count: int, pieces: int) -> torch.Tensor:
    """Samples as (micro-batch, piece, sample) along `dim` -> as (piece, micro-batch, sample)."""
    if pieces == 1:
        return value
    shape = value.shape
    return value.reshape(*shape[:dim], count, pieces, -1, *shape[dim + 1 :]).transpose(dim, dim + 1).reshape(shape)


def _scaled(value: torch.Tensor, scale: float) -> torch.Tensor:
    return value if scale == 1.0 else (value * scale).to(value.dtype)


class _MicroFunction(torch.autograd.Function):
    """All parts as one differentiable function of the parameters; backward scales gradients that are there."""

    @staticmethod
    def forward(
        ctx: Any, step: MicroStep, held: HeldGradients, bind: BindPart, axes: Sequence[int], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            results, ctx.gradients = step.run_with_gradients(bind, axes)
        ctx.step, ctx.held = step, held
        ctx.mark_non_differentiable(
            *(v for v, output in zip(results, step.forward_outputs, strict=True) if output.role != "loss")
        )
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        step: MicroStep = ctx.step
        if ctx.gradients is None:
            raise RuntimeError("the gradients of micro-batches were handed out already; call the module again")
        gradients, ctx.gradients = ctx.gradients, None
        tangent = next(t for t, output in zip(tangents, step.forward_outputs, strict=True) if output.role == "loss")
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(tangent.to(gradient.dtype))
        for position, late in ctx.held.release():
            gradients[position] = late if gradients[position] is None else gradients[position] + late
        names = [output.name for output in step.lowered.outputs if output.role == "gradient"]
        by_name = dict(zip(names, gradients, strict=True))
        return (
            None,
            None,
            None,
            None,
            *(
                as_gradient(step.program, step.plan, step.groups, value.name, by_name.get(value.name))
                for value in step.lowered.inputs
                if value.role == "parameter"
            ),
        )


def emit_micro(
    micro: MicroProgram, lowered: Program, parts: MicroPartition, plan: Plan, groups: ProcessGroups
) -> MicroStep:
    """Bind the graphs of `parts` (of the `lowered` program of one part) to processes and kernels."""
    graphs = [parts.statistics, parts.partition.forward, parts.partition.backward]
    groups.create(group_symbols(*(graph for graph in graphs if graph is not None)))
    statistics, forward, backward = (None if graph is None else bind_groups(graph, groups) for graph in graphs)
    assert forward is not None
    return MicroStep(
        micro=micro,
        lowered=lowered,
        plan=plan,
        groups=groups,
        graphs=PartGraphs(
            statistics=statistics, forward=forward, backward=backward, micro=micro, backend=plan.kernel_backend
        ),
        totals=parts.totals,
    )
