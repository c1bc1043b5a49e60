"""A program that is captured and planned already, as a module that trains under the plan.

module = ParallelModule(model, UnderPlan(program, plan)); module.build_for((), inputs)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.api import realize
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram, Program
from autopar.runtime.process_groups import ProcessGroups, StageProcesses
from autopar.runtime.step.emitted_step import Step


@dataclass(frozen=True, slots=True, eq=False)
class UnderPlan:
    """A `StepMaker` of a program that is captured and planned already."""

    program: Program | MicroProgram
    plan: Plan

    def step(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
        pinned: Plan | None,
        groups: ProcessGroups | None,
    ) -> Step:
        """The program under the plan, whatever the arguments."""
        kind = ProcessGroups(self.plan.mesh, "cpu") if self.plan.pipeline is None else StageProcesses(self.plan, "cpu")
        return realize(self.program, self.plan, kind)

    def again(self, step: Step, edited: Plan) -> Step:
        """The program under an edit of the plan, in the same processes."""
        return realize(self.program, edited, step.groups)
