"""A program that is captured and planned already, as a module that trains under the plan.

module = ParallelModule(model, UnderPlan(program, plan)); module.build_for((), inputs)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autopar.api import realize
from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram, Program
from autopar.runtime.process_groups import ProcessGroups, processes_of
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
        return realize(self.program, self.plan, processes_of(self.plan, "cpu"))

    def under(
        self,
        plan: Plan | str | Path,
        first: Step,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
    ) -> tuple[UnderPlan, Step]:
        """The program under another plan."""
        other = UnderPlan(self.program, plan if isinstance(plan, Plan) else Plan.load(plan))
        return other, realize(self.program, other.plan, processes_of(other.plan, "cpu"))

    @property
    def cluster(self) -> Cluster | None:
        """Nothing is known of it."""
        return None

    def again(self, step: Step, edited: Plan) -> Step:
        """The program under an edit of the plan, in the same processes."""
        return realize(self.program, edited, step.groups)
