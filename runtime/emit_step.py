"""Emit: what a rank's step was lowered to, bound to its processes and kernels, as the `Step` that a module calls."""

from __future__ import annotations

from autopar.passes.lowering.checks import check_ranks, collective_order
from autopar.passes.lowering.observers import is_checked
from autopar.passes.lowering.stage import LoweredStep
from autopar.runtime.consensus import attempt_on_all, gather_from_all
from autopar.runtime.pipeline.emit_pipeline import emit_pipeline
from autopar.runtime.process_groups import ProcessGroups, StageProcesses
from autopar.runtime.step.emit import emit
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.micro_batch_runs import emit_micro


def emit_step(lowered: LoweredStep, groups: ProcessGroups) -> Step:
    """The function that this rank runs; all ranks call it alike. lowered: for this rank, all passes behind it."""
    if is_checked():
        _check_order(lowered, groups)
    if isinstance(groups, StageProcesses):
        return emit_pipeline(lowered, groups)
    return emit_micro(lowered, groups) if lowered.only.context.adds_up else emit(lowered, groups)


def _check_order(lowered: LoweredStep, groups: ProcessGroups) -> None:
    """Raise CheckFailed, on every rank, where ranks of a group would start other collectives."""
    mine = {stage.number: collective_order(stage) for stage in lowered.stages}
    everyone = gather_from_all((groups.coordinate, mine))
    for stage in {number for _, held in everyone for number in held}:
        orders = {place: held[stage] for place, held in everyone if stage in held}
        attempt_on_all(lambda orders=orders: check_ranks(orders, groups.mesh))  # type: ignore[misc]
