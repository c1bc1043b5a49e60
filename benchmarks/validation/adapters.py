"""LoRA: products of a frozen weight with two narrow ones beside it, and no gradient of the frozen weight.

    y = x W + (x A) B          forward reads x and adds to y; backward reads both again for the gradients of A and B

A narrow product takes what its operands move: in sum over both passes x and y four times each, so every product of the
program pays for its left operand (x in forward, the gradient of y in backward) four times.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.program_costs import ProgramAction
from benchmarks.validation.runs import TrainingRun

TIMES = 4
ELEMENT_BYTES = 2
"""Adapters compute in 16 bits."""


def with_adapters(run: TrainingRun, action: ProgramAction) -> ProgramAction:
    """A product of a layer with its adapter's time; other actions unchanged."""
    if not action.operand_elements or not action.name.startswith("layers."):
        return action
    moved = TIMES * ELEMENT_BYTES * action.operand_elements
    return replace(action, seconds=action.seconds + moved / run.cluster.device.memory_bytes_per_second)
