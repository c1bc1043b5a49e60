"""Memory as constraints: the two moments at which a step can be fullest, as rows over the decisions.

    after forward    parameters + optimizer state + kept gathered weights + everything saved for backward
    after backward   parameters + optimizer state + gradients

Saved is what a backward operator reads of the forward pass, in its producer's layout: backward redistributes it anew,
so the saved bytes do not depend on the reader. Transient buffers are measured on the lowered program and taken off the
budget (`planning.py`), so the limit holds for the program that runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autopar.layout import Mesh
from autopar.planner.build import Built
from autopar.planner.factorisation import shape_of
from autopar.planner.leaves import StateBytes
from autopar.planner.operators import base_of
from autopar.planner.prices import Floats, tensor_bytes
from autopar.planner.solver import MemoryRow
from autopar.planner.strategies import local_fraction
from autopar.rules.engine import tensor_operands


def memory_rows(
    built: Built, mesh: Mesh, state_bytes: Mapping[str, StateBytes], budget_bytes: float
) -> tuple[MemoryRow, ...]:
    """The rows for one budget in bytes per device."""
    states, gradients, kept = _parameter_bytes(built, mesh, state_bytes)
    saved = saved_bytes(built, mesh)
    after_forward = {index: states[index] + kept[index] for index in states} | saved
    after_backward = {index: states[index] + gradients[index] for index in states}
    return (
        MemoryRow(name="after forward", bytes=after_forward, budget_bytes=budget_bytes),
        MemoryRow(name="after backward", bytes=after_backward, budget_bytes=budget_bytes),
    )


def saved_bytes(built: Built, mesh: Mesh) -> dict[int, Floats]:
    """Variable of each forward operator -> per strategy, local bytes that its saved outputs take."""
    read_in_backward = {
        base_of(operand)[0]
        for node in built.operators
        if node.meta["phase"] == "backward"
        for operand in tensor_operands(node)
    }
    found: dict[int, Floats] = {}
    for node, index in built.operators.items():
        if node.meta["phase"] == "backward":
            continue
        variable = built.variables[index]
        total = np.zeros(len(variable.costs))
        for output, layouts in enumerate(variable.layouts):
            if layouts is not None and (node, output) in read_in_backward:
                fractions = np.array(
                    [local_fraction(layout, shape_of(node, output), mesh) for layout in layouts.distinct]
                )
                total += tensor_bytes(node, output) * fractions[layouts.index]
        if total.any():
            found[index] = total
    return found


def _parameter_bytes(
    built: Built, mesh: Mesh, state_bytes: Mapping[str, StateBytes]
) -> tuple[dict[int, Floats], dict[int, Floats], dict[int, Floats]]:
    """(parameter and optimizer state, gradient, kept gathered copy) bytes of every parameter variable, per label."""
    states: dict[int, Floats] = {}
    gradients: dict[int, Floats] = {}
    kept: dict[int, Floats] = {}
    for node, index in built.placeholders.items():
        variable = built.variables[index]
        if variable.kind != "parameter":
            continue
        shape, nbytes = shape_of(node), tensor_bytes(node)
        elements, state = math.prod(shape), state_bytes[variable.name]
        stored = np.array([local_fraction(label.stored, shape, mesh) for label in variable.labels])
        used = np.array([local_fraction(label.used, shape, mesh) for label in variable.labels])
        gathered = np.array([label.keep_gathered for label in variable.labels])
        states[index] = stored * (nbytes + elements * state.optimizer)
        gradients[index] = stored * elements * state.gradient
        kept[index] = np.where(gathered, used * nbytes, 0.0)
    return states, gradients, kept
