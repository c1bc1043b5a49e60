"""Seconds of block moves: what ranks send each other once, outside of any step.

    seconds = max over ranks of rounds * (pair(bytes in the node / rounds) + pair(bytes across nodes / rounds))

pair being the price of a collective between neighbours (`collective_costs.py`), for the larger of what a rank sends and
receives. Messages to the same node and to others are taken to go one behind the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from autopar.cost_models.collective_costs import collective_seconds
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.layouts.block_moves import Numbered


def move_seconds(moves: Iterable[Numbered], cluster: Cluster) -> float:
    """moves: with their rounds (`in_rounds`); rank r lies on node r // devices_per_node."""
    per_node = cluster.devices_per_node
    rounds: dict[int, set[int]] = defaultdict(set)
    traffic: dict[tuple[int, bool, str], int] = defaultdict(int)
    for number, move in moves:
        across = move.source // per_node != move.target // per_node
        for rank, way in ((move.source, "sent"), (move.target, "received")):
            rounds[rank].add(number)
            traffic[rank, across, way] += move.nbytes
    return max((_of_rank(rank, len(found), traffic, cluster) for rank, found in rounds.items()), default=0.0)


def _of_rank(rank: int, rounds: int, traffic: dict[tuple[int, bool, str], int], cluster: Cluster) -> float:
    seconds = 0.0
    for across in (False, True):
        nbytes = max(traffic[rank, across, way] for way in ("sent", "received"))
        pair = GroupTopology(
            ranks=2, nodes=1 + across, ranks_per_node=2 - across, groups_per_node=cluster.devices_per_node
        )
        seconds += rounds * float(collective_seconds("neighbours", nbytes / rounds, pair, cluster))
    return seconds
