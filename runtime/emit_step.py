"""Emit: what a rank's step was lowered to, bound to its processes and kernels, as the `Step` that a module calls."""

from __future__ import annotations

from autopar.passes.lowering.checks import check_ranks, collective_order
from autopar.passes.lowering.observers import is_checked
from autopar.passes.lowering.stage import LoweredStep
from autopar.runtime.consensus import from_first_rank, gather_from_all
from autopar.runtime.pipeline.emit_pipeline import emit_pipeline
from autopar.runtime.process_groups import ProcessGroups, StageProcesses
from autopar.runtime.step.emit import emit
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.micro_batch_runs import emit_micro


def emit_step(lowered: LoweredStep, groups: ProcessGroups) -> Step:
    """The function that this rank runs; all ranks call it alike. lowered: for this rank, all passes behind it."""
    if from_first_rank(is_checked):
        _check_order(lowered, groups)
    if isinstance(groups, StageProcesses):
        return emit_pipeline(lowered, groups)
    return emit_micro(lowered, groups) if lowered.only.context.adds_up else emit(lowered, groups)


def _check_order(lowered: LoweredStep, groups: ProcessGroups) -> None:
    """Raise CheckFailed, on every rank, where ranks of a group would start other collectives."""
    mine = {f"stage {stage.number}": collective_order(stage.graphs) for stage in lowered.stages}
    if lowered.statistics is not None:
        mine["statistics"] = collective_order({"program": lowered.statistics.graph_module})
    everyone = gather_from_all((groups.first_rank, groups.coordinate, mine))
    for first, part in sorted({(first, part) for first, _, held in everyone for part in held}):
        check_ranks({place: held[part] for at, place, held in everyone if at == first and part in held}, groups.mesh)
