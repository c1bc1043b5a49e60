"""Step maker: who makes the steps of a module, as `ParallelModule` asks for them; `autopar.api` has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import nn

from autopar.hardware.cluster import Cluster
from autopar.plans.parallel_plan import Plan
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.emitted_step import Step


class StepMaker(Protocol):
    """Who makes the function of a graph: for the first arguments, and where others have new shapes."""

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
        """Capture, plan, lower and emit for arguments of global shapes. pinned: the plan whose mesh and parameter
        layouts must be kept (None: choose), groups: its processes."""

    def again(self, step: Step, edited: Plan) -> Step:
        """The same step under a plan that is an edit of its own; graphs of other arguments are planned by it, too."""

    def under(
        self,
        plan: Plan | str | Path,
        first: Step,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        training: bool,
    ) -> tuple[StepMaker, Step]:
        """Who makes the steps from now on, and the first of them, under another plan for as many processes. first: that
        of now; model, args, kwargs: without weights and values."""

    @property
    def cluster(self) -> Cluster | None:
        """Where the processes run, for predictions."""
