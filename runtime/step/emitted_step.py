"""Step: the emitted function of one rank, as `ParallelModule` calls it: the whole batch at once, or in parts.

    results = step(leaves, bind, held, axes=(0,), local=False)

`WholeStep` binds the leaves once, and runs backward when it is asked for. `PartsStep` binds the leaves of every part,
and runs forward and backward of all of them in the call, in the order of a schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import fx

from autopar.errors import ConfigurationError
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import HOST
from autopar.program import Input, MicroProgram, Output, Program
from autopar.runtime.parameters import StageParameters, held_tensor
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.accumulation import HeldGradients

Bind: TypeAlias = Callable[[Sequence[Any]], list[torch.Tensor]]
"""Leaves of the arguments -> the values of `Step.bound_inputs`, in their order."""


@dataclass(frozen=True, kw_only=True)
class Step(ABC):
    """The meaning of inputs and outputs, and the call.

    micro: the program and how it makes up the batch, of which the whole is one part. lowered: its inputs and gradients
    on this rank; it may have a seed input. own_plan: what this rank goes by: the plan, in a pipeline that of its rank
    group on `groups.mesh`; layouts of parameters say in which order placed experts lie (`as_held`). groups: the
    processes of its collectives; in a pipeline those that hold the same stages.
    stage_parameters: which parameters this rank holds.
    """

    micro: MicroProgram
    lowered: Program
    plan: Plan
    own_plan: Plan
    groups: ProcessGroups
    stage_parameters: StageParameters

    @property
    def program(self) -> Program:
        """The captured program of global shapes that one run computes: of the batch, or of one part."""
        return self.micro.program

    @property
    def whole(self) -> Program:
        """The captured program of the whole batch."""
        return self.micro.whole

    @cached_property
    def bound_inputs(self) -> tuple[Input, ...]:
        """The inputs that `Bind` gives, in order."""
        return tuple(value for value in self.lowered.inputs if value.role not in ("tangent", "statistic"))

    @cached_property
    def forward_outputs(self) -> tuple[Output, ...]:
        """What a call returns: mutations, loss, outputs and guards."""
        returned = ("mutation", "loss", "output", "guard")
        return tuple(output for output in self.program.outputs if output.role in returned)

    def parameter_gradient(self, name: str, block: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the parameter `name` as the module holds it, from the local block (of `reduce_dtype`).

        Raises ConfigurationError where autograd is going to look for NaN in it, which it cannot do in a DTensor."""
        if block is None:
            return None
        if not self.groups.is_alone and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            raise ConfigurationError(
                "torch.autograd.detect_anomaly looks for NaN with an operator that DTensors do not have, and sees the "
                "whole step as one function: look at the gradients by name behind backward (parameter.grad.isnan() for "
                "name, parameter in module.named_parameters()), or write detect_anomaly(check_nan=False)"
            )
        parameter, plan = self._parameters[name], self.own_plan.parameters[name]
        if plan.stored_on == HOST:
            block = self._on_host(block)
        block = block.to(parameter.dtype)
        return held_tensor(block, parameter.shape, plan.stored, self.groups)

    def _on_host(self, block: torch.Tensor) -> torch.Tensor:
        """A block that the host may read: copies that the device awaits are awaited here, too."""
        if self.groups.device.type == "cuda":
            torch.cuda.current_stream(self.groups.device).synchronize()
        return block.to("cpu")

    @cached_property
    def _parameters(self) -> dict[str, Input]:
        return {value.name: value for value in self.program.inputs if value.role == "parameter"}

    @cached_property
    def computes_in_fp16(self) -> bool:
        """Whether gradients may vanish that no scale holds up."""
        values = (node.meta.get("val") for node in self.program.graph.nodes)
        return any(isinstance(value, torch.Tensor) and value.dtype == torch.float16 for value in values)

    @cached_property
    def tangents_behind(self) -> dict[str, frozenset[str]]:
        """What a gradient is computed from: its name -> outputs."""
        found: dict[fx.Node, frozenset[str]] = {
            node: frozenset({value.name} if value.role == "tangent" else ())
            for node, value in zip(self.program.placeholders, self.program.inputs, strict=True)
        }
        for node in self.program.graph.nodes:
            found.setdefault(node, frozenset().union(*(found[operand] for operand in node.all_input_nodes)))
        pairs = zip(self.program.returned, self.program.outputs, strict=True)
        return {o.name: found[node] for node, o in pairs if o.role == "gradient" and isinstance(node, fx.Node)}

    @abstractmethod
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
