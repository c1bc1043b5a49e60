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
from autopar.parallel_plan import Plan
from autopar.planner.kept import Kept
from autopar.program import Program
from autopar.questions import Options, capture_at, plan_program

KEPT_MESHES = 32
"""Problems that are kept for the next question; those of a large model take some hundred MB each."""


@dataclass(slots=True, eq=False)
class Source:
    """The program of a plan and the question that it answers. model: of the program, as long as somebody holds it."""

    program: Program
    options: Options
    model: weakref.ref[nn.Module]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    captures: Captures
    kept: Kept

    @staticmethod
    def of(
        program: Program,
        options: Options,
        model: nn.Module,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        captures: Captures,
    ) -> Source:
        """The source of plans of a model that was captured."""
        return Source(program, options, weakref.ref(model), arguments, captures, Kept(KEPT_MESHES))

    def at_batch(self, size: int) -> Program:
        """The model captured at another size of the batch. Raises ConfigurationError where it is gone."""
        model = self.model()
        if model is None:
            raise ConfigurationError(
                "the model that this plan was made of is gone, and parts of the batch need it: hold it, or ask through "
                "autopar.Planner(model, inputs, cluster=...)"
            )
        args, kwargs = self.arguments
        return capture_at(self.program, model, args, kwargs, self.options, self.captures, size)

    def plan(self, options: Options) -> Plan:
        """The plan that answers `options`."""
        return plan_program(self.program, options, None, self.at_batch, self.kept)
