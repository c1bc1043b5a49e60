"""Seconds of the exchanges of expert parallelism, which the lowered program of a rank does not hold.

Every chosen row goes to its expert and back, in forward and again in backward: straight, or by kernels that forward
between nodes (DeepEP, HybridEP), as `token_routes.py` says. Routing by groups of experts (DeepSeek) bounds the nodes of
a token where no node holds parts of several.
"""

from __future__ import annotations

from autopar.hardware.group_topology import GroupTopology
from benchmarks.validation.runs import Experts, TrainingRun
from benchmarks.validation.token_routes import forwarded, straight

ELEMENT_BYTES = 2
"""Tokens travel in 16 bits."""
_PASSES = 2
"""To the experts and back."""


def exchange_seconds(run: TrainingRun, backward: bool) -> float:
    """Seconds of the exchanges of one layer of experts in one pass over a micro-batch; 0 without expert parallelism.

    Backward sends again what recomputation of the whole layer needs.
    """
    parallel, experts = run.parallel, run.model.experts
    inner = parallel.expert_tp or parallel.tp
    ranks = run.cluster.num_devices
    if experts is None or parallel.ep == 1 or parallel.ep * inner > ranks:
        return 0.0
    tokens = parallel.micro_batch * run.model.seq_len / parallel.cp / parallel.tp * inner
    token_bytes = tokens * run.model.hidden * ELEMENT_BYTES
    shape = (max(1, ranks // (parallel.ep * inner)), parallel.ep, inner)
    topology = GroupTopology.of(run.cluster, shape, (1,))
    times = _PASSES * (2 if backward and _sends_again(run) else 1)
    if topology.nodes == 1 or not run.stack.forwards_tokens:
        return times * straight(token_bytes, experts.per_token, topology).seconds(run.cluster)
    legs = forwarded(token_bytes, experts.count, experts.per_token, topology, _most_nodes(experts, topology.nodes))
    return times * max(leg.seconds(run.cluster) for leg in legs)


def _most_nodes(experts: Experts, nodes: int) -> int | None:
    """Nodes that a token reaches at most by its groups of experts; None where nodes hold parts of several."""
    return nodes * experts.groups_per_token // experts.groups if nodes % experts.groups == 0 else None


def _sends_again(run: TrainingRun) -> bool:
    parallel = run.parallel
    return parallel.recompute == "full" or (parallel.recompute == "selective" and "moe" in parallel.recompute_modules)
