"""One capture for all plans of a setting: tracing takes longer than lowering, and a capture holds no weights.

    captured = Captured(setting)
    program = captured.program(plan)               # of one micro-batch where the plan has several
    module = captured.module(plan)                 # as `autopar.compile(model, inputs, plan=plan)`, on every rank

Only the processes of this folder share captures; who trains one model has one plan.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from autopar.api import realize
from autopar.capture import Captures
from autopar.cluster import Cluster
from autopar.parallel_plan import Plan
from autopar.planner.micro_batches import in_parts
from autopar.program import MicroProgram, Program
from autopar.questions import Options, capture_at, capture_program
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.process_groups import ProcessGroups, StageProcesses
from autopar.runtime.step import Step
from benchmarks.plan_quality.settings import Setting


class Captured:
    """The programs of a setting's model, by the number of micro-batches."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._model, self.inputs = setting.model_and_inputs()
        self._options = Options(cluster=Cluster.parse("1 cpu"), optimizer=torch.optim.SGD)
        self._captures = Captures()
        self._whole = capture_program(self._model, (), dict(self.inputs), True, self._options, self._captures)
        self._parts: dict[int, MicroProgram] = {}

    def program(self, plan: Plan) -> Program:
        """What the plan lowers. Raises NotSeparable where the model has no such micro-batches."""
        made = self._run_by(plan)
        return made.program if isinstance(made, MicroProgram) else made

    def module(self, plan: Plan) -> ParallelModule:
        """A new copy of the model that trains under the plan; all ranks call it alike."""

        def build(
            model: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            *,
            training: bool,
            pinned: Plan | None,
            groups: ProcessGroups | None,
        ) -> Step:
            processes = ProcessGroups(plan.mesh, "cpu") if plan.pipeline is None else StageProcesses(plan, "cpu")
            return realize(self._run_by(plan), plan, processes)

        model, inputs = self._setting.model_and_inputs()
        module = ParallelModule(model, build)
        module.build_for((), dict(inputs))
        return module

    def _run_by(self, plan: Plan) -> Program | MicroProgram:
        if plan.pipeline is None and plan.micro_batches == 1:
            return self._whole
        if plan.micro_batches not in self._parts:
            at = functools.partial(
                capture_at, self._whole, self._model, (), dict(self.inputs), self._options, self._captures
            )
            self._parts[plan.micro_batches] = in_parts(self._whole, plan.micro_batches, at)
        return self._parts[plan.micro_batches]
