"""Seconds of the exchanges of expert parallelism, which the lowered program of a rank does not hold.

Every chosen row goes to its expert and back, in forward and again in backward. Between nodes kernels that forward
(DeepEP, HybridEP) send a token once to each node that has one of its experts, and inside the node to all of them:

    all at once       tokens x topk x hidden x 2 bytes to random ranks
    forwarded         tokens x k (1 - (1 - 1/k)^topk) x hidden x 2 over the NICs, while NVLink carries the former

for k nodes: of 8 experts on 2 nodes 2 copies cross instead of 8.
"""

from __future__ import annotations

import math

from autopar.cost_models.collective_costs import collective_seconds
from autopar.hardware.group_topology import GroupTopology
from benchmarks.validation.runs import TrainingRun

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
        return times * _all_to_all(run, token_bytes * experts.per_token, topology)
    inside = GroupTopology(
        ranks=topology.ranks_per_node, nodes=1, ranks_per_node=topology.ranks_per_node,
        groups_per_node=topology.groups_per_node,
    )  # fmt: skip
    across = GroupTopology(
        ranks=topology.nodes, nodes=topology.nodes, ranks_per_node=1,
        groups_per_node=topology.groups_per_node * topology.ranks_per_node,
    )  # fmt: skip
    return times * max(
        _all_to_all(run, token_bytes * experts.per_token, inside),
        _all_to_all(run, token_bytes * copies(topology.nodes, experts.per_token), across),
    )


def copies(nodes: int, per_token: int) -> float:
    """Expected number of nodes that hold one of a token's experts, which are drawn at random."""
    return nodes * (1.0 - (1.0 - 1.0 / nodes) ** per_token)


def _sends_again(run: TrainingRun) -> bool:
    parallel = run.parallel
    return parallel.recompute == "full" or (parallel.recompute == "selective" and "moe" in parallel.recompute_modules)


def _all_to_all(run: TrainingRun, nbytes: float, topology: GroupTopology) -> float:
    if topology.ranks == 1:
        return 0.0
    return float(collective_seconds("all_to_all", math.ceil(nbytes), topology, run.cluster))
