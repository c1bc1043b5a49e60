"""Emit: what a rank's step was lowered to, bound to its processes and kernels, as the `Step` that a module calls."""

from __future__ import annotations

from autopar.passes.lowering.chain import resumed
from autopar.passes.lowering.checks import check_ranks, collective_order
from autopar.passes.lowering.observers import is_checked
from autopar.passes.lowering.stage import LoweredStep
from autopar.runtime.consensus import from_first_rank, gather_from_all
from autopar.runtime.host_memory.host_budget import check_room
from autopar.runtime.host_memory.stream_copies import stream_copies
from autopar.runtime.pipeline.emit_parts import emit_parts
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.emitted_step import Step
from autopar.runtime.step.symmetric_memory import as_memory_allows
from autopar.runtime.step.whole_step import emit_whole


def emit_step(lowered: LoweredStep, groups: ProcessGroups) -> Step:
    """The function that this rank runs; all ranks call it alike. lowered: for this rank (`step_to_run`)."""
    lowered = as_memory_allows(lowered, groups)
    if lowered.plan.waits_on_host:
        check_room(lowered.plan)
        if groups.device.type == "cuda":
            stream_copies()
    if from_first_rank(is_checked):
        lowered = resumed(lowered, lowered.plan)
        _check_order(lowered, groups)
    in_parts = any(stage.context.adds_up for stage in lowered.stages)
    return emit_parts(lowered, groups) if in_parts else emit_whole(lowered, groups)


def _check_order(lowered: LoweredStep, groups: ProcessGroups) -> None:
    """Raise CheckFailed, on every rank, where ranks of a group would start other collectives."""
    mine = {f"stage {stage.number}": collective_order(stage.graphs) for stage in lowered.stages}
    if lowered.statistics is not None:
        mine["statistics"] = collective_order({"program": lowered.statistics.graph_module})
    everyone = gather_from_all((groups.members(groups.group)[0], groups.coordinate, mine))
    for first, part in sorted({(first, part) for first, _, held in everyone for part in held}):
        check_ranks({place: held[part] for at, place, held in everyone if at == first and part in held}, groups.mesh)
