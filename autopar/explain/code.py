"""Code: the program of one rank as readable Python, each line with where it comes from and what it takes.

    # forward
    mm = aten.mm(view, t)                          # layers.0.up/mm#0  (2048, 1024) S(0) R  190 us
    wait = all_gather_into_tensor(w, 8, 'dp_shard')  # layers.1.up.weight  (1024, 4096)  1.2 ms on dp_shard

Lines are those of the graph that the runtime runs, collectives in buckets and started early; seconds are the price
list's for the kernel or collective that begins in this line. A kernel of several lines stands at its first one. Several
stages are printed by `stage_code.py`.
"""

from __future__ import annotations

import math

from autopar.explain.answers import RankProgram
from autopar.explain.asked_step import asked_step
from autopar.explain.bodies import bodies
from autopar.explain.graph_lines import graph_lines
from autopar.explain.source import Source
from autopar.explain.stage_code import Printer
from autopar.plans.parallel_plan import Plan

PHASES = {"F": "forward", "B": "backward"}


def rank_program(source: Source, plan: Plan, rank: int) -> RankProgram:
    """The program of one rank; seconds: of all kernels and collectives, of one step where there are several stages,
    else of one micro-batch. Raises ConfigurationError for a rank that the plan does not have."""
    asked, group = asked_step(source, plan), plan.group_of(rank)
    graphs = asked.graphs(rank)
    if plan.in_stages:
        printer = Printer(plan, graphs, asked.step, group)
        return RankProgram(rank=rank, text="\n".join(printer.lines(rank)), seconds=printer.step_seconds)
    lines, total = [f"# rank {rank} of {plan.num_ranks}, {plan.micro_batches} micro-batches per step"], []
    for body in bodies(asked.step, graphs.of[0], {"F", "B"}):
        total += [action.seconds for action in body.actions if action.kind != "views"]
        lines += ["", f"# {PHASES[body.turn]}", *graph_lines(body.graph, plan, body.inputs, body.prices)]
    return RankProgram(rank=rank, text="\n".join(lines), seconds=math.fsum(total))
