"""Source: what a plan was made from: its program and the question that it answers.

The captured program is held, the model only weakly: a plan must not keep the weights of a model alive. What needs the
model itself (micro-batches: a capture at another size of the batch) says so where it is gone.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.capture import Captures
from autopar.errors import ConfigurationError
from autopar.passes.kernels.use_kernels import with_kernels
from autopar.planner.batch.micro_batch_program import planned_parts
from autopar.planner.problem.factorisation import Factorisation
from autopar.planner.problem.program_cache import Memo, ProgramCache
from autopar.plans.parallel_plan import Plan
from autopar.program import MicroProgram, Program
from autopar.questions import CapturedModel, plan_program
from autopar.request import Request
from autopar.rules.learning import learn_rules

KEPT_MESHES = 32
"""Problems that are kept for the next question; those of a large model take some hundred MB each."""
KEPT_PARTS = 2
"""Programs of micro-batches that are kept: of the plan that is asked, and of another one beside it."""


@dataclass(slots=True, eq=False)
class Source:
    """The program of a plan and the question that it answers. model: of the program, as long as somebody holds it."""

    program: Program
    request: Request
    model: weakref.ref[nn.Module]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    captures: Captures
    kept: ProgramCache
    parts: Memo[MicroProgram]

    @staticmethod
    def of(captured: CapturedModel) -> Source:
        """The source of plans of a model that was captured."""
        return Source(
            captured.program,
            captured.request,
            weakref.ref(captured.model),
            (captured.args, captured.kwargs),
            captured.captures,
            ProgramCache(KEPT_MESHES),
            Memo(KEPT_PARTS),
        )

    def at_batch(self, size: int) -> Program:
        """The model captured at another size of the batch. Raises ConfigurationError where it is gone."""
        model = self.model()
        if model is None:
            raise ConfigurationError(
                "the model that this plan was made of is gone, and parts of the batch need it: hold it, or ask through "
                "autopar.Planner(model, inputs, cluster=...)"
            )
        args, kwargs = self.arguments
        captured = CapturedModel(
            program=self.program, model=model, args=args, kwargs=kwargs, request=self.request, captures=self.captures
        )
        program = captured.at_batch(size)
        if self.request.discover:
            learn_rules(program)
        return program

    def in_parts(self, plan: Plan) -> MicroProgram:
        """The program of one micro-batch of a plan. Raises PlanMismatchError where the model does not run so."""
        whole = with_kernels(self.program, plan.kernels)
        factorisation = self.kept.factorisations.recall(whole, lambda: Factorisation(whole))
        count, kernels = plan.micro_batches, plan.kernels
        return self.parts.recall(
            (count, kernels), lambda: planned_parts(self.program, count, self, factorisation, kernels)
        )

    def program_of(self, plan: Plan) -> Program | MicroProgram:
        """What a step of the plan runs: the program with its kernels of ours, or that of one micro-batch."""
        return with_kernels(self.program, plan.kernels) if plan.in_one_part else self.in_parts(plan)

    def plan(self, request: Request) -> Plan:
        """The plan that answers `request`."""
        return plan_program(self.program, request, self, self.kept)
