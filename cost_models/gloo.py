"""What collectives of CPU tensors take, by what they really send: seconds = rounds(n) * hop + S * wire(n) / rate.

S = bytes of the full buffer, n ranks. `runtime/collectives/host_collectives.py` sends every block straight to the rank
that needs it, all at once, over gloo's connections; `rounds` and `wire` of each kind are the table ALGORITHMS. Two
decisions are made here for the runtime too: a small all_reduce gathers all copies in one round (`gathers_all_copies`),
and groups with several ranks on each of several nodes first add up inside of the nodes (`takes_two_levels`). Prices
take the better of both ways. Where the link carries a measured line for the kind, that line replaces the formula,
scaled by rounds and wire to another number of ranks.

    gloo_seconds("all_reduce", sizes, topology, Cluster.parse("4 cpu"))     # 2 rounds of 84 us + 1.5 S / rate

Source: traffic and rounds counted on an emulated network (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import CollectiveFit, Link
from autopar.hardware.group_topology import GroupTopology

Seconds: TypeAlias = NDArray[np.float64]
Line: TypeAlias = tuple[float, float]
"""(seconds, seconds per byte of the full buffer)."""

INTRA_HOP_SECONDS = 54e-6
"""Beyond the latency of the loopback: a round takes 84 us (all_reduce of 4 ranks: 502 us in 6 rounds)."""
INTER_HOP_SECONDS = 84e-6
"""Beyond twice the latency of a network, since a round is acknowledged (200 us: 606 us a round, 500 us: 1228)."""
EFFICIENCY = 0.66
"""Part of the point-to-point rate that a rank reaches which sends to all others and receives from them."""
ALL_COPIES_BYTES = 16 << 10
"""What a rank may send more to save a round: a round between nodes takes 0.5 ms and more."""
TWO_LEVEL_BYTES = 32 << 10
"""From this buffer on it pays to add up inside of the nodes first: that is one round more over the loopback."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What one rank does among n ranks."""

    rounds: Callable[[int], float]
    """Hops one after the other."""
    wire: Callable[[int], float]
    """Bytes sent by one rank per byte of the full buffer."""


def _others(n: int) -> float:
    return (n - 1) / n


def _twice_others(n: int) -> float:
    return 2.0 * _others(n)


def _tree_hops(n: int) -> float:
    return float(math.ceil(math.log2(n)))


def _one(n: int) -> float:
    return 1.0


def _two(n: int) -> float:
    return 2.0


ALGORITHMS: Mapping[str, Algorithm] = {
    "all_reduce": Algorithm(_two, _twice_others),
    "all_gather": Algorithm(_one, _others),
    "reduce_scatter": Algorithm(_one, _others),
    "all_to_all": Algorithm(_one, _others),
    # torch's own, a binomial tree: the root sends to log2(n) children, 2.08 S counted for 4 ranks
    "broadcast": Algorithm(_tree_hops, _tree_hops),
    "neighbours": Algorithm(_one, _one),
}
IN_LEVELS = ("all_reduce", "all_gather", "reduce_scatter")


def gathers_all_copies(nbytes: float, ranks: int) -> bool:
    """Whether an all_reduce of so many bytes sends every rank's whole buffer to every other one, in one round."""
    return (ranks - 1) * nbytes <= ALL_COPIES_BYTES


def takes_two_levels(nbytes: float, nodes: int, ranks_per_node: int) -> bool:
    """Whether a collective of IN_LEVELS first adds up inside of each node, or gathers across the nodes first."""
    return nodes > 1 and ranks_per_node > 1 and nbytes >= TWO_LEVEL_BYTES


def sent_bytes(kind: str, nbytes: float, nodes: int, ranks_per_node: int) -> tuple[float, float]:
    """(inside of its node, to other nodes): the bytes that one rank sends in a collective of a buffer of `nbytes`."""
    n, k, g = nodes * ranks_per_node, nodes, ranks_per_node
    if n == 1:
        return 0.0, 0.0
    if kind == "all_reduce" and gathers_all_copies(nbytes, n):
        return (g - 1) * nbytes, (n - g) * nbytes
    if kind in IN_LEVELS and takes_two_levels(nbytes, nodes, ranks_per_node):
        passes = ALGORITHMS[kind].rounds(n)
        return passes * (g - 1) / g * nbytes, passes * (k - 1) / k / g * nbytes
    wire = ALGORITHMS[kind].wire(n) * nbytes
    # of a ring only the last rank of a node has its next one elsewhere; else all ranks are sent equally much
    across = (k > 1) / g if kind == "neighbours" else (n - g) / (n - 1)
    return wire * (1.0 - across), wire * across


def gloo_seconds(kind: str, sizes: Seconds, topology: GroupTopology, cluster: Cluster) -> Seconds:
    """Seconds of one collective of more than one rank; same shape as `sizes` (bytes of the full buffer)."""
    seconds = _cheapest(_within_node(cluster.intra_link, kind, topology.ranks), sizes)
    if topology.nodes > 1:
        # the part inside the nodes is never free: a group on more nodes is not cheaper than on one
        seconds = np.maximum(seconds, _cheapest(_across_nodes(kind, topology, cluster), sizes))
    return seconds


def _cheapest(lines: Sequence[Line], sizes: Seconds) -> Seconds:
    return np.min([latency + sizes * per_byte for latency, per_byte in lines], axis=0)  # type: ignore[no-any-return]


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


def _within_node(link: Link, kind: str, ranks: int) -> list[Line]:
    """The ways that a collective may take between ranks of one node."""
    measured = measured_line(link, kind, ranks, ALGORITHMS)
    if measured is not None:
        return [measured]
    hop = link.latency_seconds + INTRA_HOP_SECONDS
    return _direct(kind, ranks, hop, ALGORITHMS[kind].wire(ranks) / (link.bytes_per_second * EFFICIENCY))


def _direct(kind: str, ranks: int, hop: float, per_byte: float) -> list[Line]:
    """Everybody to everybody, for an all_reduce also with whole copies; per_byte: of the wire of ALGORITHMS."""
    lines = [(ALGORITHMS[kind].rounds(ranks) * hop, per_byte)]
    if kind == "all_reduce":
        lines.append((hop, per_byte * (ranks - 1) / ALGORITHMS[kind].wire(ranks)))
    return lines


def _across_nodes(kind: str, topology: GroupTopology, cluster: Cluster) -> list[Line]:
    """The ways between nodes: all blocks straight to where they are needed, or in two levels."""
    fit = next((f for f in cluster.inter_link.fits if (f.kind, f.ranks) == (kind, topology.ranks)), None)
    if fit is not None:
        return [(fit.latency_seconds, 1.0 / fit.bytes_per_second)]
    inter_hop = 2.0 * cluster.inter_link.latency_seconds + INTER_HOP_SECONDS
    intra_hop = cluster.intra_link.latency_seconds + INTRA_HOP_SECONDS
    intra_rate = EFFICIENCY * cluster.intra_link.bytes_per_second
    node_rate = cluster.inter_link.bytes_per_second * cluster.devices_per_node / topology.groups_per_node
    rate = EFFICIENCY * node_rate
    n, k, g = topology.ranks, topology.nodes, topology.ranks_per_node
    if kind in ("broadcast", "neighbours"):  # a tree, or a ring, crosses the boundary of each node once
        rounds = ALGORITHMS[kind].rounds(n)
        across = min(rounds, ALGORITHMS[kind].rounds(k))
        slowest = min(rate, intra_rate) if g > 1 else rate
        return [((rounds - across) * intra_hop + across * inter_hop, ALGORITHMS[kind].wire(n) / slowest)]
    share = (n - g) / (n - 1)  # of what a rank sends, to other nodes
    lines = _direct(kind, n, inter_hop, ALGORITHMS[kind].wire(n) * share * g / rate)
    if kind in IN_LEVELS and g > 1:
        passes = ALGORITHMS[kind].rounds(n)
        per_byte = passes * ((k - 1) / k / rate + (g - 1) / g / intra_rate)
        lines.append((passes * (intra_hop + inter_hop), per_byte))
    return lines
