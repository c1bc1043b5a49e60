"""Stage bodies: every graph that one stage runs, with the kernels and collectives that it takes, and how often.

bodies(step, stage, {"F", "B"})      F, B: once per micro-batch; PREPARE, LATE: once per step, where there is any
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import fx

from autopar.cost_models.operators import optimizer_seconds
from autopar.cost_models.program_costs import ProgramAction
from autopar.priced_stages import PricedStage
from autopar.schedules.actions import Kind
from autopar.step_program import StepProgram

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
    def is_once_per_step(self) -> bool:
        """Whether it runs once per step and not per micro-batch."""
        return self.turn in ("prepare", "late")


def bodies(step: StepProgram, stage: PricedStage, kinds: Collection[Kind]) -> Iterator[Body]:
    """In the order in which a step first runs them. kinds: of the passes that the schedule has of this stage."""
    halves = stage.lowered.halves
    found: list[tuple[Turn, fx.GraphModule, bool]] = []
    if stage.lowered.prepared is not None:
        found.append(("prepare", stage.lowered.prepared.prepare, False))
    found.append(("F", stage.lowered.partition.forward, True))
    if halves is not None and "B" in kinds:
        found.append(("B", halves.whole, True))
    if halves is not None and "I" in kinds:
        found += [("I", halves.inputs, True), ("W", halves.weights, False)]
    if stage.lowered.late is not None:
        found.append(("late", stage.lowered.late.reduce, False))
    for turn, module, hands_on in found:
        phase = "forward" if turn in ("prepare", "F") else "backward"
        yield Body(turn, stage, module.graph, step.actions(module.graph, phase, on=stage, hands_on=hands_on))


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
