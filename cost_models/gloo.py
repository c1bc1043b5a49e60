"""What gloo's collectives take, by what they really send: seconds = rounds(n) * hop + S * wire(n) / rate.

S = bytes of the full buffer, n ranks. `rounds` and `wire` of each kind are the table ALGORITHMS; torch's
reduce_scatter, for one, is an all_reduce, and a broadcast is a binomial tree. Where the link carries a measured line
for the kind, that line replaces the formula, scaled by rounds and wire to another number of ranks.

    gloo_seconds("all_reduce", sizes, topology, Cluster.parse("4 cpu"))     # 6 rounds of 204 us + 1.5 S / 1.25 GB/s

Source: gloo's traffic and rounds counted on an emulated network (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster, GroupTopology
from autopar.hardware import CollectiveFit, Link

Seconds: TypeAlias = NDArray[np.float64]

INTRA_HOP_SECONDS = 54e-6
"""Beyond the latency of the loopback: a round takes 84 us (all_reduce of 4 ranks: 502 us in 6 rounds)."""
INTER_HOP_SECONDS = 84e-6
"""Beyond twice the latency of a network, since a round is acknowledged (200 us: 606 us a round, 500 us: 1228)."""
RING_EFFICIENCY = 0.66
"""Part of the point-to-point rate that rings reach."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What one rank does among n ranks."""

    rounds: Callable[[int], float]
    """Hops one after the other."""
    wire: Callable[[int], float]
    """Bytes sent by one rank per byte of the full buffer."""


def _ring(n: int) -> float:
    return (n - 1) / n


def _hops(n: int) -> float:
    return n - 1.0


def _twice_ring(n: int) -> float:
    return 2.0 * _ring(n)


def _twice_hops(n: int) -> float:
    return 2.0 * _hops(n)


def _tree_hops(n: int) -> float:
    return float(math.ceil(math.log2(n)))


def _one(n: int) -> float:
    return 1.0


ALGORITHMS: Mapping[str, Algorithm] = {
    "all_reduce": Algorithm(_twice_hops, _twice_ring),
    "all_gather": Algorithm(_hops, _ring),
    # torch's gloo reduce_scatter is an all_reduce: 1.56 S counted on the wire for 4 ranks, not 0.75 S
    "reduce_scatter": Algorithm(_twice_hops, _twice_ring),
    "all_to_all": Algorithm(_one, _ring),
    # binomial tree: the root sends to log2(n) children, 2.08 S counted for 4 ranks
    "broadcast": Algorithm(_tree_hops, _tree_hops),
    "neighbours": Algorithm(_one, _one),
}


def gloo_seconds(kind: str, sizes: Seconds, topology: GroupTopology, cluster: Cluster) -> Seconds:
    """Seconds of one collective of more than one rank; same shape as `sizes` (bytes of the full buffer)."""
    latency, seconds_per_byte = _within_node(cluster.intra_link, kind, topology.ranks)
    seconds = latency + sizes * seconds_per_byte
    if topology.nodes > 1:
        # the part inside the nodes is never free: a group on more nodes is not cheaper than on one
        across, across_per_byte = _across_nodes(kind, topology, cluster)
        seconds = np.maximum(seconds, across + sizes * across_per_byte)
    return seconds


def measured_line(link: Link, kind: str, ranks: int, algorithms: Mapping[str, Algorithm]) -> tuple[float, float] | None:
    """(seconds, seconds per byte) from the link's fits of this kind, scaled by rounds and wire; None without one.

    The fit whose number of ranks is nearest in ratio counts, the larger where two are equally near.
    """
    fits = [fit for fit in link.fits if fit.kind == kind]
    if not fits:
        return None
    fit: CollectiveFit = min(fits, key=lambda fit: (abs(math.log(fit.ranks / ranks)), -fit.ranks))
    algorithm = algorithms[kind]
    latency = fit.latency_seconds * algorithm.rounds(ranks) / algorithm.rounds(fit.ranks)
    return latency, algorithm.wire(ranks) / algorithm.wire(fit.ranks) / fit.bytes_per_second


def _within_node(link: Link, kind: str, ranks: int) -> tuple[float, float]:
    measured = measured_line(link, kind, ranks, ALGORITHMS)
    if measured is not None:
        return measured
    algorithm = ALGORITHMS[kind]
    hop = link.latency_seconds + INTRA_HOP_SECONDS
    return algorithm.rounds(ranks) * hop, algorithm.wire(ranks) / (link.bytes_per_second * RING_EFFICIENCY)


def _across_nodes(kind: str, topology: GroupTopology, cluster: Cluster) -> tuple[float, float]:
    """A flat ring crosses each node's boundary once: the node's NICs carry what one rank sends."""
    fit = next((f for f in cluster.inter_link.fits if (f.kind, f.ranks) == (kind, topology.ranks)), None)
    if fit is not None:
        return fit.latency_seconds, 1.0 / fit.bytes_per_second
    inter_hop = 2.0 * cluster.inter_link.latency_seconds + INTER_HOP_SECONDS
    node_rate = cluster.inter_link.bytes_per_second * cluster.devices_per_node / topology.groups_per_node
    rate = RING_EFFICIENCY * node_rate
    n, g = topology.ranks, topology.ranks_per_node
    if kind == "all_to_all":  # each rank sends (n - g) / n of its buffer over its share of the NICs
        return inter_hop, (n - g) / n * g / rate
    algorithm = ALGORITHMS[kind]
    rounds = algorithm.rounds(n)
    inter_rounds = min(rounds, algorithm.rounds(topology.nodes))
    if g > 1:
        rate = min(rate, RING_EFFICIENCY * cluster.intra_link.bytes_per_second)
    intra_hop = cluster.intra_link.latency_seconds + INTRA_HOP_SECONDS
    return (rounds - inter_rounds) * intra_hop + inter_rounds * inter_hop, algorithm.wire(n) / rate
