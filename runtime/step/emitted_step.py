"""Step: the emitted function of one rank, as `ParallelModule` calls it: the whole batch at once, or in parts.

results = step(leaves, bind, held, axes=(0,), local=False)       # WholeStep: bind(leaves) once
                                                                 # MicroStep: bind(leaves of part i) for every part
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from autopar.plans.parallel_plan import Plan
from autopar.program import Output, Program
from autopar.runtime.parameters import StageParameters
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.accumulation import HeldGradients

Bind: TypeAlias = Callable[[Sequence[Any]], list[torch.Tensor]]
"""Leaves of the arguments -> the values of all inputs but tangents and statistics, in the order of `lowered.inputs`."""


class Step(Protocol):
    """The meaning of inputs and outputs, and the call."""

    @property
    def program(self) -> Program:
        """The captured program of global shapes that one run computes: of the batch, or of one part."""

    @property
    def whole(self) -> Program:
        """The captured program of the whole batch."""

    @property
    def lowered(self) -> Program:
        """`program` for this rank; it may have a seed input."""

    @property
    def plan(self) -> Plan:
        """The plan by which it was lowered."""

    @property
    def own_plan(self) -> Plan:
        """What this rank goes by: the plan, in a pipeline that of its rank group on `groups.mesh`."""

    @property
    def groups(self) -> ProcessGroups:
        """The processes of its collectives; in a pipeline those that hold the same stages."""

    @property
    def stage_parameters(self) -> StageParameters:
        """Which parameters this rank holds, in a pipeline."""

    @property
    def forward_outputs(self) -> tuple[Output, ...]:
        """What a call returns."""

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
        """Run on the leaves of a call: one local tensor of the whole batch per entry of `forward_outputs`.

        held: gradients of earlier calls that are not reduced yet. axes: the mesh axes over which the ranks share the
        samples; local: each rank passes its part of the batch, not the whole. loss_scale: by which the loss is going to
        be multiplied (None: by nothing), so that a step that runs backward in the call runs it with that scale.
        """
