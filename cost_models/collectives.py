"""Seconds of one collective: alpha + beta * bytes, per backend, with what the backend really sends.

S = bytes of the full logical buffer (all-gather output, reduce-scatter input, all-reduce buffer, all-to-all
local send total, edges that one rank sends to its neighbours), n ranks on k nodes with g = n / k each. A ring of the
backend costs

    seconds = base + rounds(n) * hop + S * wire(n) / bandwidth

where `rounds` and `wire` are the table BACKENDS. Inside a node the bandwidth is the link's; a group that
spans nodes shares the NICs with its siblings (`GroupTopology.groups_per_node`). Where the link carries a
measured `CollectiveFit` for the ring size, that line replaces the formula; for another ring size it is
scaled by rounds and wire. NCCL takes the faster of its protocols, and for an all-reduce ring or tree.

Sources: NVIDIA/nccl src/graph/tuning.cc @5067397 (latencies, protocol efficiencies), nccl-tests
doc/PERFORMANCE.md @a0b82b2 (bus factors), gloo's traffic counted on an emulated network (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cluster import Cluster, GroupTopology
from autopar.hardware import CollectiveFit, Link

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "neighbours"]
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What one rank does in a ring of n ranks."""

    rounds: Callable[[int], float]
    """Hops one after the other."""
    wire: Callable[[int], float]
    """Bytes sent by one rank per byte of the full buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way in which the backend moves a buffer: cheap to start or fast to stream."""

    name: str
    base_seconds: float
    """Launch of the collective, before the first hop."""
    intra_hop_seconds: float
    """Added to the latency of a hop inside a node."""
    inter_hop_seconds: float
    """Added to the latency of a hop between nodes."""
    efficiency: float
    """Part of the link's rate that reaches the data."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A collective library as data."""

    algorithms: Mapping[str, Algorithm]
    protocols: tuple[Protocol, ...]
    """The last one streams large buffers: a measured fit takes its place."""


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


BACKENDS: Mapping[str, Backend] = {
    "nccl": Backend(
        algorithms={
            "all_reduce": Algorithm(_twice_hops, _twice_ring),
            "all_gather": Algorithm(_hops, _ring),
            "reduce_scatter": Algorithm(_hops, _ring),
            "all_to_all": Algorithm(_one, _ring),
            "broadcast": Algorithm(_hops, _one),
            "neighbours": Algorithm(_one, _one),
        },
        protocols=(
            # tuning.cc baseLatency and hwLatency of Ring. LL reaches llMaxBw / ring rate = 87.7 / 230 (A100),
            # 141 / 345 (H100) of the link. A hop is the link's own (LL) latency plus these, so that LL and
            # Simple take 0.6 and 3.4 us over NVLink, 2.7 and 14.0 us over networks. LL128 is left out: with
            # its formula, measured all_reduces of 1..16 MiB (2, 4, 8 A100, vTrain) are 31, 26, 20 % too cheap
            # (median error); without it the error is 7, 4, 19 %, because the fitted line holds the ramp.
            Protocol(name="LL", base_seconds=6.6e-6, intra_hop_seconds=0.0, inter_hop_seconds=0.0,
                     efficiency=0.38),
            Protocol(name="Simple", base_seconds=8.4e-6, intra_hop_seconds=2.8e-6, inter_hop_seconds=11.3e-6,
                     efficiency=1.0),
        ),
    ),
    "gloo": Backend(
        algorithms={
            "all_reduce": Algorithm(_twice_hops, _twice_ring),
            "all_gather": Algorithm(_hops, _ring),
            # torch's gloo reduce_scatter is an all_reduce: 1.56 S counted on the wire for 4 ranks, not 0.75 S
            "reduce_scatter": Algorithm(_twice_hops, _twice_ring),
            "all_to_all": Algorithm(_one, _ring),
            # binomial tree: the root sends to log2(n) children, 2.08 S counted for 4 ranks
            "broadcast": Algorithm(_tree_hops, _tree_hops),
            "neighbours": Algorithm(_one, _one),
        },
        protocols=(
            # A round over the loopback takes 84 us (all_reduce of 4 ranks: 502 us in 6 rounds); a hop on a
            # network adds its latency twice (200 us: 606 us a round, 500 us: 1228). Rings reach 0.66 of the
            # point-to-point rate.
            Protocol(name="tcp", base_seconds=0.0, intra_hop_seconds=54e-6, inter_hop_seconds=84e-6,
                     efficiency=0.66),
        ),
    ),
}  # fmt: skip

NCCL_TREE_BASE_SECONDS = 6.8e-6
"""tuning.cc baseLatency_us of Tree LL."""
NCCL_TREE_BANDWIDTH_FRACTION = 0.92
"""tuning.cc: a tree reaches 0.92 of the bus bandwidth."""
NCCL_ALL_TO_ALL_NODES = (2.0, 4.0, 8.0, 16.0, 32.0)
NCCL_ALL_TO_ALL_SECONDS = (37e-6, 42e-6, 60e-6, 98e-6, 290e-6)
"""0-byte all-to-all of 8-GPU H100 nodes, by nodes (meta-pytorch/autoparallel, from nccl-tests)."""
NCCL_ALL_TO_ALL_NETWORK_LOSS = 0.44
"""All-to-all over k nodes reaches 1 - 0.44 / k of the NIC (meta-pytorch/autoparallel, fit to nccl-tests)."""


def collective_seconds(
    kind: CollectiveKind, nbytes: ArrayLike, topology: GroupTopology, cluster: Cluster
) -> Seconds:
    """Seconds of one collective with all sibling groups running it at the same time; same shape as `nbytes`.

    `nbytes` counts the full logical buffer of one group. 0 for one rank and for empty buffers.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    if topology.ranks == 1:
        return np.zeros_like(sizes)
    seconds = _within_node(kind, sizes, topology.ranks, cluster)
    if topology.nodes > 1:
        # the part inside the nodes is never free: a group on more nodes is not cheaper than on one
        seconds = np.maximum(seconds, _across_nodes(kind, sizes, topology, cluster))
    return np.where(sizes > 0, seconds, 0.0)


def _within_node(kind: CollectiveKind, sizes: Seconds, ranks: int, cluster: Cluster) -> Seconds:
    backend, link = BACKENDS[cluster.collective_backend], cluster.intra_link
    algorithm = backend.algorithms[kind]
    streaming = _streaming_line(link, kind, ranks, backend)
    lines = [streaming]
    for protocol in backend.protocols[:-1]:
        hop = link.latency_seconds + protocol.intra_hop_seconds
        latency = protocol.base_seconds + algorithm.rounds(ranks) * hop
        lines.append((latency, streaming[1] / protocol.efficiency))
    return _cheapest([latency + sizes * seconds_per_byte for latency, seconds_per_byte in lines])


def _streaming_line(link: Link, kind: str, ranks: int, backend: Backend) -> tuple[float, float]:
    """(seconds, seconds per byte) of large buffers: measured where there is a fit, else the formula."""
    algorithm, protocol = backend.algorithms[kind], backend.protocols[-1]
    fit = _nearest_fit(link, kind, ranks)
    if fit is None:
        hop = link.latency_seconds + protocol.intra_hop_seconds
        rate = link.bytes_per_second * protocol.efficiency
        return protocol.base_seconds + algorithm.rounds(ranks) * hop, algorithm.wire(ranks) / rate
    latency = fit.latency_seconds * algorithm.rounds(ranks) / algorithm.rounds(fit.ranks)
    return latency, algorithm.wire(ranks) / algorithm.wire(fit.ranks) / fit.bytes_per_second


def _cheapest(candidates: list[Seconds]) -> Seconds:
    return np.min(np.stack(candidates), axis=0)  # type: ignore[no-any-return]


def _nearest_fit(link: Link, kind: str, ranks: int) -> CollectiveFit | None:
    """The fit of this kind whose ring size is nearest in ratio; the larger where two are equally near."""
    fits = [fit for fit in link.fits if fit.kind == kind]
    return min(fits, key=lambda fit: (abs(math.log(fit.ranks / ranks)), -fit.ranks), default=None)


def _across_nodes(kind: CollectiveKind, sizes: Seconds, topology: GroupTopology, cluster: Cluster) -> Seconds:
    fit = next((f for f in cluster.inter_link.fits if (f.kind, f.ranks) == (kind, topology.ranks)), None)
    if fit is not None:
        return fit.latency_seconds + sizes / fit.bytes_per_second
    if kind == "all_to_all":
        return _all_to_all_across_nodes(sizes, topology, cluster)
    candidates = [
        _ring_across_nodes(kind, sizes, topology, cluster, protocol)
        for protocol in BACKENDS[cluster.collective_backend].protocols
    ]
    if kind == "all_reduce" and cluster.collective_backend == "nccl":
        candidates.append(_tree_across_nodes(sizes, topology, cluster))
    return _cheapest(candidates)


def _network_rate(topology: GroupTopology, cluster: Cluster) -> float:
    """Bytes/s out of one node for one group: the node's NICs divided among the sibling groups on it."""
    return cluster.inter_link.bytes_per_second * cluster.devices_per_node / topology.groups_per_node


def _ring_across_nodes(
    kind: CollectiveKind, sizes: Seconds, topology: GroupTopology, cluster: Cluster, protocol: Protocol
) -> Seconds:
    """A flat ring crosses each node's boundary once, so the node's NICs carry what one rank sends."""
    algorithm = BACKENDS[cluster.collective_backend].algorithms[kind]
    rounds = algorithm.rounds(topology.ranks)
    inter_rounds = min(rounds, algorithm.rounds(topology.nodes))
    intra_hop = cluster.intra_link.latency_seconds + protocol.intra_hop_seconds
    # a gloo round trip acknowledges over the network (see BACKENDS), an RDMA hop does not
    crossings = 2.0 if cluster.collective_backend == "gloo" else 1.0
    inter_hop = crossings * cluster.inter_link.latency_seconds + protocol.inter_hop_seconds
    rate = protocol.efficiency * _network_rate(topology, cluster)
    if topology.ranks_per_node > 1:
        rate = min(rate, protocol.efficiency * cluster.intra_link.bytes_per_second)
    latency = protocol.base_seconds + (rounds - inter_rounds) * intra_hop + inter_rounds * inter_hop
    return latency + sizes * (algorithm.wire(topology.ranks) / rate)


def _tree_across_nodes(sizes: Seconds, topology: GroupTopology, cluster: Cluster) -> Seconds:
    """NCCL's double binary tree of nodes: S per node and direction for two nodes, 2 S for more."""
    intra = 2.0 * (topology.ranks_per_node - 1) * cluster.intra_link.latency_seconds
    inter = 2.0 * math.log2(topology.nodes) * cluster.inter_link.latency_seconds
    rate = NCCL_TREE_BANDWIDTH_FRACTION * _network_rate(topology, cluster)
    return NCCL_TREE_BASE_SECONDS + intra + inter + sizes * ((1.0 if topology.nodes == 2 else 2.0) / rate)


def _all_to_all_across_nodes(sizes: Seconds, topology: GroupTopology, cluster: Cluster) -> Seconds:
    """Each rank sends (n - g) / n of its buffer over its share of the NICs."""
    n, g, k = topology.ranks, topology.ranks_per_node, topology.nodes
    if cluster.collective_backend == "nccl":
        latency = float(np.interp(k, NCCL_ALL_TO_ALL_NODES, NCCL_ALL_TO_ALL_SECONDS))
        efficiency = 1.0 - NCCL_ALL_TO_ALL_NETWORK_LOSS / k
    else:
        protocol = BACKENDS["gloo"].protocols[-1]
        latency = 2.0 * cluster.inter_link.latency_seconds + protocol.inter_hop_seconds
        efficiency = protocol.efficiency
    rate = efficiency * _network_rate(topology, cluster) / g
    return latency + sizes * ((n - g) / n / rate)
