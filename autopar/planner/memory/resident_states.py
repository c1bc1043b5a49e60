"""Resident: what parameters and optimizer hold on a rank throughout, and the peak of a lowered step beside them.

states = resident_states(lowered, state_bytes, device)     parameters 2.1e9, optimizer 8.4e9, ...
peak_bytes(step, state_bytes, device)                      12.6e9, at the fullest moment of the step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_models.optimizer_step import step_buffer_bytes
from autopar.hardware.devices import Device
from autopar.passes.lowering.micro_batch_graphs import joined_bytes
from autopar.passes.lowering.stage import LoweredStep
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.step_bytes import step_bytes
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.program import MicroProgram, Program
from autopar.schedules.folding_schedule import kept_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentStates:
    """Of the parameters of one rank: bytes on the device, of the optimizer's state and of its step, and the step's
    seconds; host: bytes in the memory of the host, gradients included; host_traffic: of the step there."""

    parameters: float
    optimizer: float
    step_buffers: float
    step_seconds: float
    host: float = 0.0
    host_traffic: float = 0.0

    def bytes_beside(self, micro: MicroProgram, lowered: Program) -> float:
        """What stays throughout a step, what is joined of its parts included."""
        return self.parameters + self.optimizer + joined_bytes(micro, lowered)


def resident_states(lowered: Program, state_bytes: Mapping[str, StateBytes], device: Device) -> ResidentStates:
    """Of a program of local shapes. state_bytes: per element, by parameter."""
    parameters = optimizer = seconds = host = host_traffic = 0.0
    updated = []
    for entry in lowered.inputs:
        if entry.role == "parameter":
            elements, state = math.prod(entry.shape), state_bytes[entry.name]
            if entry.on_host:
                host += elements * (entry.dtype.itemsize + state.optimizer + state.gradient)
                host_traffic += elements * state.step_traffic
                continue
            parameters += elements * entry.dtype.itemsize
            optimizer += elements * state.optimizer
            seconds += float(state.step_seconds(device, elements))
            updated.append((float(elements * entry.dtype.itemsize), state.step_buffers))
    return ResidentStates(
        parameters=parameters,
        optimizer=optimizer,
        step_buffers=step_buffer_bytes(updated, device.kind),
        step_seconds=seconds if lowered.training else 0.0,
        host=host,
        host_traffic=host_traffic if lowered.training else 0.0,
    )


def with_totals(state: StateBytes, count: int, in_shards: bool) -> StateBytes:
    """State of a step in `count` parts: in logical shards the sums that a fold keeps, beside the gradients of the part
    that runs; else one total."""
    if in_shards:
        return replace(state, optimizer=state.optimizer + kept_sums(count) * state.gradient)
    return replace(state, optimizer=state.optimizer + state.gradient, gradient=0.0)


def peak_bytes(step: LoweredStep, state_bytes: Mapping[str, StateBytes], device: Device) -> float:
    """What the rank of a step without stages holds at its fullest moment. state_bytes: of a step in one part."""
    lowered, count = step.only.program, step.micro.count
    if count > 1:
        state_bytes = {name: with_totals(state, count, bool(step.plan.shards)) for name, state in state_bytes.items()}
    states = resident_states(lowered, state_bytes, device)
    constant = states.bytes_beside(step.micro, lowered)
    measured = step_bytes(step.only, Lifetimes(step.program), constant, states.step_buffers)
    return float(np.nanmax(measured))
