"""One capture for all plans of a setting: tracing takes longer than lowering, and a capture holds no weights.

    captured = Captured(setting)
    program = captured.program(plan)               # of one micro-batch where the plan has several
    module = captured.module(plan)                 # as `autopar.compile(model, inputs, plan=plan)`, on every rank

Only the processes of this folder share captures; who trains one model has one plan.
"""

from __future__ import annotations

import torch

from autopar.capture import Captures
from autopar.hardware.cluster import Cluster
from autopar.planner.batch.micro_batch_program import in_parts
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram, Program
from autopar.questions import capture_model
from autopar.request import Request
from autopar.runtime.parallel_module import ParallelModule
from benchmarks.plan_quality.settings import Setting
from benchmarks.under_plan import UnderPlan


class Captured:
    """The programs of a setting's model, by the number of micro-batches."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._model, self.inputs = setting.model_and_inputs()
        request = Request(cluster=Cluster.parse("1 cpu"), optimizer=torch.optim.SGD)
        self._captured = capture_model(self._model, (), dict(self.inputs), request, Captures(), training=True)
        self._parts: dict[int, MicroProgram] = {}

    def program(self, plan: Plan) -> Program:
        """What the plan lowers. Raises NotSeparable where the model has no such micro-batches."""
        made = self._run_by(plan)
        return made.program if isinstance(made, MicroProgram) else made

    def module(self, plan: Plan) -> ParallelModule:
        """A new copy of the model that trains under the plan; all ranks call it alike."""
        model, inputs = self._setting.model_and_inputs()
        module = ParallelModule(model, UnderPlan(self._run_by(plan), plan))
        module.build_for((), dict(inputs))
        return module

    def _run_by(self, plan: Plan) -> Program | MicroProgram:
        if plan.pipeline is None and plan.micro_batches == 1:
            return self._captured.program
        if plan.micro_batches not in self._parts:
            self._parts[plan.micro_batches] = in_parts(self._captured.program, plan.micro_batches, self._captured)
        return self._parts[plan.micro_batches]
