"""Bodies: every graph that one stage runs, with the kernels and collectives that it takes, and how often.

bodies(step, stage, {"F", "B"})      F, B: once per micro-batch; PREPARE, LATE: once per step, where there is any
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import fx

from autopar.cost_models.operator_costs import optimizer_seconds
from autopar.cost_models.program_costs import ProgramAction
from autopar.schedules.actions import Kind
from autopar.simulation.priced_stages import PricedStage
from autopar.simulation.step_program import StepProgram

Turn: TypeAlias = Literal["F", "B", "I", "W", "prepare", "late"]
"""A pass of the schedule, or what runs once per step in front of all passes, or behind them."""


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """One graph of a stage and what it takes."""

    turn: Turn
    stage: PricedStage
    graph: fx.Graph
    actions: Sequence[ProgramAction]

    @property
    def seconds(self) -> float:
        """Of all its kernels and collectives, one after the other."""
        return math.fsum(action.seconds for action in self.actions)

    @property
    def prices(self) -> dict[int, tuple[float, str]]:
        """Position of a node -> (seconds of the kernel or collective that begins there, its stream)."""
        return {one.position: (one.seconds, one.stream) for one in self.actions if one.kind != "views"}

    @property
    def inputs(self) -> frozenset[str]:
        """Names of what the program of its stage is given."""
        return frozenset(entry.name for entry in self.stage.lowered.program.inputs)

    @property
    def is_once_per_step(self) -> bool:
        """Whether it runs once per step and not per micro-batch."""
        return self.turn in ("prepare", "late")


def bodies(step: StepProgram, stage: PricedStage, kinds: Collection[Kind]) -> Iterator[Body]:
    """In the order in which a step first runs them. kinds: of the passes that the schedule has of this stage."""
    halves, hands_on, parts = stage.lowered.halves, stage.lowered.context.in_pipeline, stage.lowered.partition
    whole = parts.backward if halves is None else halves.whole
    found: list[tuple[Turn, fx.GraphModule, bool]] = []
    if stage.lowered.prepared is not None:
        found.append(("prepare", stage.lowered.prepared.prepare, False))
    found.append(("F", parts.forward, hands_on))
    if whole is not None and "B" in kinds:
        found.append(("B", whole, hands_on))
    if halves is not None and "I" in kinds:
        found += [("I", halves.inputs, True), ("W", halves.weights, False)]
    if stage.lowered.late is not None:
        found.append(("late", stage.lowered.late.reduce, False))
    for turn, module, is_handed_on in found:
        phase = "forward" if turn in ("prepare", "F") else "backward"
        yield Body(turn, stage, module.graph, step.actions(module.graph, phase, on=stage, hands_on=is_handed_on))


def optimizer_parts(step: StepProgram, stages: Sequence[PricedStage]) -> dict[str, float]:
    """Parameter -> seconds of the optimizer on the rank that holds these stages; each parameter counts once."""
    if not step.program.training:
        return {}
    return {
        entry.name: float(
            optimizer_seconds(stage.cluster.device, math.prod(entry.shape) * step.state_bytes[entry.name].step_traffic)
        )
        for stage in stages
        for entry in stage.lowered.program.inputs
        if entry.role == "parameter"
    }
