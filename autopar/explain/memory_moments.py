"""Memory: where the bytes of the fullest moment of a step are, by kind, by module and over time.

    parameters                      1.2 GiB     stored blocks
    optimizer state                 2.4 GiB     with the totals of gradients where a step has micro-batches
    gradients                       0.6 GiB     finished ones
    activations saved for backward  8.1 GiB     made in forward, read in backward
    gathered parameters             0.4 GiB     whole, while they are read
    moved by collectives            0.2 GiB     copies in other layouts, buckets
    working values                  1.1 GiB     everything else that lives just then

    stage    ranks    states     in flight                  peak
    0        0 .. 3   1.2 GiB    4 x 0.8 GiB                4.9 GiB        1F1B: 4 micro-batches wait for their backward
    1        4 .. 7   1.2 GiB    3 x 0.8 GiB                4.1 GiB

A rank takes its passes one after the other, so what it holds follows from their order alone: states; what every
forward left for its backward; what the first half of a backward left for the second; and inside of a pass the live
ranges of its graph (`graphs/live_ranges.py`). No stages is one stage: nothing waits beside the pass that runs, and a
moment is told by its operator alone. It is what the simulator counts (`step_program.py`), buffer by buffer.
"""

from __future__ import annotations

import math

from autopar.cost_models.usable_memory import communicator_bytes
from autopar.explain.answers import MemoryTable
from autopar.explain.asked_step import asked_step
from autopar.explain.climbed_rungs import ladder_of
from autopar.explain.communicators import communicator_ranks
from autopar.explain.held_memory import HeldMemory
from autopar.explain.memory_pieces import module_of, sums
from autopar.explain.source import Source
from autopar.plans.next_gib import next_gib_of
from autopar.plans.parallel_plan import Plan


def memory_table(source: Source, plan: Plan, rank: int | None) -> MemoryTable:
    """The table of one rank, or (None) of the first rank of the tightest group, and what every stage keeps.

    Raises ConfigurationError for a rank that the plan does not have.
    """
    asked = asked_step(source, plan)
    graphs = asked.graphs(rank or 0)
    held = [HeldMemory(asked.step, graphs, group) for group in range(len(plan.rank_groups))]
    group = max(range(len(held)), key=lambda one: held[one].peak) if rank is None else plan.group_of(rank)
    own = held[group]
    pieces = list(own.pieces(own.fullest))
    run = [graph for stage in own.own for graph in stage.lowered.graphs.values()]
    groups, kind = communicator_ranks(plan, group, run), own.own[0].cluster.device.kind
    return MemoryTable(
        rank=plan.rank_groups[group].first_rank if rank is None else rank,
        moment=own.name(own.fullest),
        peak_bytes=math.fsum(size for _, _, size in pieces),
        limit_bytes=asked.limit_bytes(group),
        by_kind=sums((kind, size) for _, kind, size in pieces),
        by_module=sums((module_of(name, own.loss), size) for name, _, size in pieces),
        over_time=tuple(own.over_time()),
        communicators=len(groups) if kind == "cuda" else 0,
        communicator_bytes=float(sum(communicator_bytes(ranks, kind) for ranks in groups)),
        ladder=ladder_of(asked.step, own),
        next_gib=next_gib_of(plan),
        stages=() if own.is_only_stage else tuple(stage for one in held for stage in one.stages()),
    )
