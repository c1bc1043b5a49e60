"""Code: the program of one rank as readable Python, each line with where it comes from and what it takes.

    # forward
    mm = aten.mm(view, t)                          # layers.0.up/mm#0  (2048, 1024) S(0) R  190 us
    wait = all_gather_into_tensor(w, 8, 'dp_shard')  # layers.1.up.weight  (1024, 4096)  1.2 ms on dp_shard

Lines are those of the graph that the runtime runs, collectives in buckets and started early; seconds are the price
list's for the kernel or collective that begins in this line. A kernel of several lines stands at its first one.
"""

from __future__ import annotations

import math

from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.program_costs import program_actions
from autopar.explain.answers import RankProgram
from autopar.explain.graph_lines import graph_lines
from autopar.explain.rank_graphs import rank_graphs
from autopar.explain.source import Source
from autopar.explain.stage_code import stage_program
from autopar.parallel_plan import Plan


def rank_program(source: Source, plan: Plan, rank: int) -> RankProgram:
    """The program of one rank. Raises ConfigurationError for a rank that the plan does not have."""
    if plan.in_stages:
        return stage_program(source, plan, rank)
    graphs = rank_graphs(source, plan, rank)
    device = graphs.query.cluster.device
    lines, total = [f"# rank {rank} of {plan.num_ranks}, {plan.micro_batches} micro-batches per step"], []
    for phase, module in zip(("forward", "backward"), graphs.partition.graphs, strict=False):
        actions = program_actions(
            module.graph,
            phase,
            cluster=graphs.query.cluster,
            mesh=plan.mesh,
            backend=plan.kernel_backend,
            prices=KernelPrices(device=device),
            segment_of=str,
        )
        prices = {action.position: (action.seconds, action.stream) for action in actions}
        total += [action.seconds for action in actions]
        lines += [
            "",
            f"# {phase}",
            *graph_lines(module.graph, plan, {entry.name for entry in graphs.lowered.inputs}, prices),
        ]
    return RankProgram(rank=rank, text="\n".join(lines), seconds=math.fsum(total))
