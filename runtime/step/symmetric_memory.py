"""Symmetric memory of a job: made in front of the first step where a plan wants it, or done without, with a word.

    plan.symmetric_memory = {"all_gather": ("tp",)}     every rank maps a block of memory of the others of its "tp"

Whether GPUs can is known where the block is mapped: it needs CUDA and access between the GPUs of one host. Where any
rank cannot, all lower the plan without it: products wait for collectives of the process group, or run in the chunks
that the plan says. That computes the same sums; of bf16 the rounding may differ in the last digit, as it does between
sizes of a product and between the ways in which a transport adds up.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

import torch
import torch.distributed as dist

from autopar._compat import map_symmetric_memory, resolve_group
from autopar.graphs.symmetric_sizes import symmetric_sizes
from autopar.ops.symmetric_products import SYMMETRIC
from autopar.passes.lowering.chain import step_to_run
from autopar.passes.lowering.stage import LoweredStep
from autopar.runtime.consensus import gather_from_all
from autopar.runtime.process_groups import ProcessGroups

log = logging.getLogger(__name__)


def as_memory_allows(lowered: LoweredStep, groups: ProcessGroups) -> LoweredStep:
    """The step, or that of its plan without symmetric memory where a rank has none; all ranks call it alike."""
    wanted = mapped_bytes(lowered)
    if not wanted:
        return lowered
    groups.create(wanted)
    why = _first(_why_not(wanted, groups)) or _first(_mapped(wanted, groups))
    if why is None:
        return lowered
    log.warning(
        "the plan runs products over %s with their collective in symmetric memory, and %s: they run one behind the "
        "other, or in the plan's chunks; plan for a cluster whose GPUs reach each other, or take "
        "plan.with_(symmetric_memory={}) to say so",
        ", ".join(sorted(wanted)), why,
    )  # fmt: skip
    return step_to_run(lowered.micro, replace(lowered.plan, symmetric_memory={}), lowered.ranks[0])


def mapped_bytes(lowered: LoweredStep) -> dict[str, int]:
    """Group -> bytes that its largest call needs mapped."""
    found: dict[str, int] = {}
    for node in (node for stage in lowered.stages for graph in stage.graphs.values() for node in graph.graph.nodes):
        if node.target in SYMMETRIC:
            group = str(node.args[-1])
            found[group] = max(found.get(group, 0), symmetric_sizes(node).mapped_bytes)
    return found


def _first(mine: str | None) -> str | None:
    """The reason of the first rank that has one."""
    return next((why for why in gather_from_all(mine or "", "who has symmetric memory") if why), None)


def _why_not(wanted: dict[str, int], groups: ProcessGroups) -> str | None:
    """What this rank knows beforehand."""
    if groups.device.type != "cuda":
        return f"the ranks run on {groups.device.type}, which has none"
    here = (socket.gethostname(), groups.device.index)
    places = gather_from_all(here, "where the ranks run")
    for group in wanted:
        members = [places[rank] for rank in dist.get_process_group_ranks(resolve_group(groups.name(group)))]
        if len({host for host, _ in members}) > 1:
            return f"the ranks of {group} run on several hosts ({', '.join(sorted({host for host, _ in members}))})"
        for _, device in members:
            # with one GPU visible to each process, numbers say nothing: mapping will
            if device != here[1] and not torch.cuda.can_device_access_peer(here[1], device):
                return f"cuda:{here[1]} has no access to the memory of cuda:{device} on {here[0]}"
    return None


def _mapped(wanted: dict[str, int], groups: ProcessGroups) -> str | None:
    """Map what the calls need; what torch says where it cannot."""
    for group, size in sorted(wanted.items()):
        try:
            map_symmetric_memory(groups.name(group), size)
        except (RuntimeError, NotImplementedError) as error:
            return f"torch cannot map it for {group} ({str(error).strip().splitlines()[0]})"
    return None
