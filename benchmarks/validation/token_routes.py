"""Routes of tokens to their experts: how many copies travel, and over which links.

    straight    every chosen (token, expert) row goes to the rank of its expert:              topk rows a token
    forwarded   one copy to each node that holds one of the token's experts, over the NICs,
                and inside the node one to each rank that does

    copies(8, 256, 8)              5.29 of 8 ranks hold one of 8 experts out of 256: what a rank of one node sends
    copies(32, 256, 8, most=16)    of 32 ranks, where routing takes half of the groups only

Both legs of a forwarded exchange run at once, chunk by chunk, so that the longer one counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost_models.collective_costs import collective_seconds
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One all-to-all of an exchange: bytes that a rank sends in it, those that stay with it too."""

    nbytes: float
    topology: GroupTopology

    def seconds(self, cluster: Cluster) -> float:
        """By the price that the planner uses for exchanges of rows."""
        return float(collective_seconds("all_to_all", self.nbytes, self.topology, cluster))


def copies(groups: int, experts: int, per_token: int, most: int | None = None) -> float:
    """Expected number of `groups` of equally many experts that hold one of a token's, drawn at random without
    repetition; most: so many groups only are drawn from."""
    reached = min(groups, most or groups)
    block = experts / groups
    pool = block * reached
    missed = math.prod(max(0.0, pool - block - i) / (pool - i) for i in range(min(per_token, math.ceil(pool))))
    return reached * (1.0 - missed)


def straight(token_bytes: float, per_token: int, topology: GroupTopology) -> Leg:
    """All rows to the ranks of their experts; token_bytes: of one copy of all tokens of a rank."""
    return Leg(nbytes=token_bytes * per_token, topology=topology)


def forwarded(
    token_bytes: float, experts: int, per_token: int, topology: GroupTopology, most_nodes: int | None = None
) -> tuple[Leg, Leg]:
    """The legs inside nodes and across them; most_nodes: routing sends a token to so many at most."""
    nodes, local = topology.nodes, topology.ranks_per_node
    inside = GroupTopology(ranks=local, nodes=1, ranks_per_node=local, groups_per_node=topology.groups_per_node)
    across = GroupTopology(
        ranks=nodes, nodes=nodes, ranks_per_node=1, groups_per_node=topology.groups_per_node * local
    )  # fmt: skip
    most_ranks = None if most_nodes is None else most_nodes * local
    return (
        Leg(nbytes=token_bytes * copies(topology.ranks, experts, per_token, most_ranks), topology=inside),
        Leg(nbytes=token_bytes * copies(nodes, experts, per_token, most_nodes), topology=across),
    )
