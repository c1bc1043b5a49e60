"""Micro-batches: one call of the module as several runs of one emitted step, forward and backward in turn.

    loss = module(batch)       for every part: forward, backward into the totals; loss = sum of the parts' losses
    loss.backward()            hands out the totals times the incoming gradient of the loss

Only one part's activations live at a time. The gradient of a loss is linear in the tangent, so loss scaling, clipping
and accumulation over calls work as ever. How the batch is cut: `batch_parts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.passes.lowering.micro_batch_graphs import drawing_for
from autopar.passes.lowering.stage import LoweredStep
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram, Output, Program
from autopar.runtime.kernels import GraphCall, kernels
from autopar.runtime.parameters import StageParameters
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.accumulation import HeldGradients
from autopar.runtime.step.batch_parts import BatchParts, scaled
from autopar.runtime.step.differentiable_parts import BindPart, run_differentiably
from autopar.runtime.step.emit import bind_groups, group_symbols, local_tensor
from autopar.runtime.step.emitted_step import Bind


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
        """The program of one part."""
        return self.micro.program

    @property
    def whole(self) -> Program:
        """The program of the whole batch."""
        return self.micro.whole

    @property
    def own_plan(self) -> Plan:
        """Every rank goes by the whole plan."""
        return self.plan

    @property
    def stage_parameters(self) -> StageParameters:
        """Every rank holds its block of every parameter."""
        return StageParameters()

    @property
    def count(self) -> int:
        """Parts of the batch."""
        return self.micro.count

    @property
    def parts(self) -> BatchParts:
        """How the batch is cut, and outputs joined."""
        return BatchParts(micro=self.micro, plan=self.plan, groups=self.groups)

    @property
    def forward_outputs(self) -> tuple[Output, ...]:
        """Loss and outputs of the whole: what a call returns."""
        return tuple(output for output in self.lowered.outputs if output.role in ("loss", "output"))

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
        """As `Step` says. Raises ConfigurationError where local parts do not split."""
        part_of = self.parts.split(axes, local)

        def bound(part: int) -> list[torch.Tensor]:
            return bind(part_of(leaves, part))

        if self.graphs.backward is None or not torch.is_grad_enabled():
            return self._run(bound, axes, None, 1.0)
        parameters = [tensor for tensor, value in zip(bound(0), self._bound, strict=True) if value.role == "parameter"]
        return run_differentiably(self, held, bound, axes, parameters, loss_scale)

    @property
    def _bound(self) -> list[Any]:
        return [value for value in self.lowered.inputs if value.role not in ("tangent", "statistic")]

    def run_with_gradients(
        self, bind: BindPart, axes: Sequence[int], loss_scale: float | None
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """(results, one complete gradient of the scaled loss per gradient of the program)."""
        gradients = [output for output in self.lowered.outputs if output.role == "gradient"]
        returned = self.lowered.returned[len(self.lowered.outputs) - len(gradients) :]
        totals: list[torch.Tensor | None] = [None] * len(gradients)
        for index in self.totals:
            node = returned[index]
            totals[index] = torch.zeros(node.meta["local_shape"], dtype=node.meta["dtype"], device=self.groups.device)
        return self._run(bind, axes, totals, loss_scale or 1.0), totals

    def _run(
        self, bind: BindPart, axes: Sequence[int], totals: list[torch.Tensor | None] | None, loss_scale: float
    ) -> tuple[torch.Tensor, ...]:
        pieces = self.parts.pieces(axes)
        statistics = self._statistics(bind, pieces)
        results: list[list[torch.Tensor]] = [[] for _ in self.forward_outputs]
        for part in range(self.count):
            graphs = self.graphs.of(part, pieces)
            returned = list(graphs.forward(self._arguments(bind(part), statistics)))
            for kept in results:
                kept.append(returned.pop(0))
            if totals is not None:
                self._backward(graphs, returned, totals, loss_scale)
            del returned
        return tuple(
            self.parts.join(output, values, axes) for output, values in zip(self.forward_outputs, results, strict=True)
        )

    def _backward(
        self, graphs: OnePart, saved: list[Any], totals: Sequence[torch.Tensor | None], loss_scale: float
    ) -> None:
        assert graphs.backward is not None
        tangent = self.micro.loss_scale * loss_scale
        tangents = [
            torch.full(value.shape, tangent, dtype=value.dtype, device=self.groups.device)
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
        return {name: scaled(value, self.micro.statistic_scales[name]) for name, value in zip(names, sums, strict=True)}

    def _arguments(self, bound: Sequence[torch.Tensor], statistics: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        remaining = map(local_tensor, bound)
        return [
            statistics[value.name] if value.role == "statistic" else next(remaining)
            for value in self.lowered.inputs
            if value.role != "tangent"
        ]


def emit_micro(lowered: LoweredStep, groups: ProcessGroups) -> MicroStep:
    """Bind the graphs of one part to processes and kernels."""
    stage, micro, plan = lowered.only, lowered.micro, lowered.plan
    graphs = [stage.statistics, stage.partition.forward, stage.partition.backward]
    groups.create(group_symbols(*(graph for graph in graphs if graph is not None)))
    statistics, forward, backward = (None if graph is None else bind_groups(graph, groups) for graph in graphs)
    assert forward is not None
    return MicroStep(
        micro=micro,
        lowered=stage.program,
        plan=plan,
        groups=groups,
        graphs=PartGraphs(
            statistics=statistics, forward=forward, backward=backward, micro=micro, backend=plan.kernel_backend
        ),
        totals=stage.totals,
    )
