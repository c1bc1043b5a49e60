"""Kept plans: a graph of another size runs under the plan of one that was planned, where its layouts hold there.

    planned at (8, 64) tokens     ->     (8, 48), (8, 80), (3, 64) tokens: the same operators by name

A plan speaks by name, so it says as much of another length, or of a last, smaller batch. It is kept where

- the lowering, which checks every entry as it checks a plan that was edited by hand, takes it,
- what it makes is the same but for numbers: no layout needs a collective, or a copy of an uneven block, that it did
  not need where the plan was made,
- the fullest moment stays within the memory limit, measured on the lowered program,
- the graph is not much larger (`LIMITS.kept_growth`): what is right for few tokens may be wrong for many.

Else the graph is planned anew, and that plan is kept beside the others: so even and odd sizes get one each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.capture.family import input_shapes
from autopar.errors import PlanMismatchError
from autopar.graphs.collective_nodes import is_start
from autopar.passes.lowering.stage import LoweredStep
from autopar.planner.memory.resident_states import peak_bytes
from autopar.planner.problem.limits import LIMITS
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.request import Request
from autopar.request.memory_limit import budget

Shapes: TypeAlias = Sequence[tuple[int, ...]]
Calls: TypeAlias = tuple[tuple[str, str], ...]
"""What the graphs of a rank call in their order, with the axes of collectives."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptPlan:
    """A plan, the input shapes of the graph that it was made for, and what that was lowered to on this rank."""

    plan: Plan
    shapes: Shapes
    calls: Calls

    def serves(self, shapes: Shapes) -> bool:
        """Whether a graph of such inputs is not much larger."""
        return _elements(shapes) <= LIMITS.kept_growth * _elements(self.shapes)

    def distance(self, shapes: Shapes) -> tuple[int, float]:
        """How many dims divide otherwise over the ranks, then by which factor the sizes differ."""
        ranks = self.plan.num_ranks
        pairs = [pair for one, two in zip(shapes, self.shapes, strict=True) for pair in zip(one, two, strict=True)]
        otherwise = sum(math.gcd(a, ranks) != math.gcd(b, ranks) for a, b in pairs)
        return otherwise, abs(math.log((1 + _elements(shapes)) / (1 + _elements(self.shapes))))

    def check(self, lowered: LoweredStep, request: Request) -> None:
        """Raises PlanMismatchError where the plan, lowered for another size, is not to be kept."""
        if _calls_of(lowered) != self.calls:
            raise PlanMismatchError("the layouts need other collectives, or other copies of blocks, at this size")
        device = request.cluster.device
        peak = peak_bytes(lowered, state_bytes(lowered.program, request.optimizer, device.kind), device)
        limit = budget(request.memory_limit, request.cluster)
        if peak > limit:
            raise PlanMismatchError(f"the step would hold {peak / 2**20:.1f} MiB, the limit is {limit / 2**20:.1f} MiB")


class KeptPlans:
    """The plans without stages of one module, by the names of what they speak of. Ranks keep the same ones."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, ...], list[KeptPlan]] = {}

    def keep(self, program: Program, lowered: LoweredStep) -> None:
        """The plan of a program that was planned."""
        if not lowered.plan.in_stages:
            kept = KeptPlan(lowered.plan, input_shapes(program), _calls_of(lowered))
            self._plans.setdefault(_names(program), []).append(kept)

    def forget(self) -> None:
        """All of them, where parameters lie otherwise from now on."""
        self._plans.clear()

    def nearest(self, program: Program) -> KeptPlan | None:
        """The plan to be tried for a program, if there is one."""
        shapes = input_shapes(program)
        known = [kept for kept in self._plans.get(_names(program), ()) if kept.serves(shapes)]
        return min(known, key=lambda kept: kept.distance(shapes), default=None)


def _names(program: Program) -> tuple[str, ...]:
    """Inputs with their roles, operators and outputs, in order: what two sizes of one model share."""
    inputs = [f"{entry.role} {entry.name}" for entry in program.inputs]
    outputs = [f"{output.role} {output.name}" for output in program.outputs]
    operators = [str(node.meta["operator"]) for node in program.graph.nodes if node.op == "call_function"]
    return (*inputs, *operators, *outputs)


def _elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def _calls_of(lowered: LoweredStep) -> Calls:
    graphs = [module.graph for stage in lowered.stages for module in stage.graphs.values()]
    return tuple(
        (str(node.target), str(node.args[-1]) if is_start(node) else "")
        for graph in graphs
        for node in graph.nodes
        if node.op == "call_function"
    )
