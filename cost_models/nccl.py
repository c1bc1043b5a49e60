"""What NCCL's collectives take on real hardware: its tuner's latencies and protocols, on measured rates.

The tuner (`nccl_tuner.py`) knows hops and protocols; it knows neither the launch nor what a byte costs beside the
link. With n ranks, S bytes of the full buffer and the traits of the link (`autopar.hardware.devices.CollectiveTraits`):

    seconds = startup + latency + S / rate + passes * S * pass + ramp * log2(1 + S / MiB)

    rate     the tuner's formula with the measured rate of a ring of n on this link
    choice   algorithm and protocol of the least latency + S / rate as NCCL believes them, for better or worse: V100
             take LL128 up to 13 MB, where it is slower than Simple (measured: 12 MiB in 300 us, 16 MiB in 274)
    passes   2 for an all-reduce (reduce, then gather), else 1: the device's memory takes each pass beside the link.
             Measured all-reduces of 2, 4, 8 A100 reach 197, 222, 229 GB/s of bus bandwidth: S * (2(n-1)/n + 0.51) / 297
    ramp     a longer buffer travels in larger chunks, and the pipeline of the ring fills later

A switch that reduces (NVLS) takes an all-reduce of 5 ranks or more at `multicast_fraction` of the link. Between nodes
the NICs of a node are divided among its sibling groups; where `double_tree`, two nodes exchange S instead of
2(n-1)/n S. Where the link carries a measured line for the kind, that line replaces the streaming protocol's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.gloo import ALGORITHMS as DIRECT
from autopar.cost_models.gloo import Algorithm, measured_line
from autopar.cost_models.nccl_tuner import TREE_FRACTION, Choice, Fabric, Group, TunedKind, tuner_lines
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import Link
from autopar.hardware.group_topology import GroupTopology

Seconds: TypeAlias = NDArray[np.float64]
Line: TypeAlias = tuple[float, float]
"""(seconds, seconds per byte of the full buffer)."""

MULTICAST_RANKS = 5
"""NVLS pays from 5 ranks on: 4 H200 reach 363 GB/s with and without (stas00/ml-engineering network/README.md)."""
BELIEVED_LL128 = 0.92
"""tuning.cc: part of the rate that a ring reaches with LL128."""
TUNER_NETWORK_HOP_SECONDS = 2.7e-6
"""The tuner's hop between nodes (Ring LL); what a network's own latency has beyond it is added to each hop."""
PLATEAU = 1.4
"""tuning.cc: latency of a ring all_reduce of many chunks between nodes ("plateau effect of ring")."""
RAMP_BYTES = 2.0**20
"""From where on a longer buffer fills its pipeline later."""
ALL_TO_ALL_NODES = (2.0, 4.0, 8.0, 16.0, 32.0)
ALL_TO_ALL_SECONDS = (37e-6, 42e-6, 60e-6, 98e-6, 290e-6)
"""0-byte all-to-all of 8-GPU H100 nodes, by nodes (meta-pytorch/autoparallel, from nccl-tests)."""
ALL_TO_ALL_NETWORK_LOSS = 0.44
"""All-to-all over k nodes reaches 1 - 0.44 / k of the NIC (meta-pytorch/autoparallel, fit to nccl-tests)."""
POINT_TO_POINT_SECONDS = 8.4e-6 + 3.4e-6
"""One hop: tuning.cc base latency of Simple and its hop over NVLink."""
NETWORK_PAIR_SECONDS = 8.4e-6 + 14e-6
"""The same over a network."""
BELIEVED_LL = 0.5
"""tuning.cc: part of the rate that a ring reaches with LL."""

_RING = Algorithm(lambda n: n - 1.0, DIRECT["all_gather"].wire)
ALGORITHMS = {
    **DIRECT,
    "all_reduce": Algorithm(lambda n: 2.0 * (n - 1.0), DIRECT["all_reduce"].wire),
    "all_gather": _RING,
    "reduce_scatter": _RING,
    "broadcast": Algorithm(_RING.rounds, DIRECT["neighbours"].wire),
}


@dataclass(frozen=True, slots=True)
class _Prices:
    """Lines of the choices that NCCL has: what it believes, by which it chooses, and what the choice then costs."""

    believed_latency: Seconds
    believed_per_byte: Seconds
    latency: Seconds
    seconds_per_byte: Seconds
    ramp_seconds: float
    """Added by each doubling of the buffer."""


def nccl_seconds(kind: str, sizes: Seconds, topology: GroupTopology, cluster: Cluster) -> Seconds:
    """Seconds of one collective of more than one rank; same shape as `sizes` (bytes of the full buffer)."""
    seconds = _evaluate(_within_node(kind, topology.ranks, cluster.intra_link), sizes)
    if topology.nodes > 1:
        # the part inside the nodes is never free: a group on more nodes is not cheaper than on one
        across = _across_nodes(kind, topology, cluster.devices_per_node, cluster.intra_link, cluster.inter_link)
        seconds = np.maximum(seconds, _evaluate(across, sizes))
    return seconds


def _evaluate(prices: _Prices, sizes: Seconds) -> Seconds:
    believed = prices.believed_latency + sizes[..., None] * prices.believed_per_byte
    chosen = believed.argmin(axis=-1)
    seconds: Seconds = prices.latency[chosen] + sizes * prices.seconds_per_byte[chosen]
    if prices.ramp_seconds:
        seconds = seconds + prices.ramp_seconds * np.log2(1.0 + sizes / RAMP_BYTES)
    return seconds


def _prices(lines: Sequence[Line], startup: float, ramp: float, real: Sequence[Line] | None = None) -> _Prices:
    """`lines` are believed; `real`, where it differs, is what each of them costs."""
    believed_latency, believed_per_byte = (np.array(column) for column in zip(*lines, strict=True))
    latency, per_byte = (np.array(column) for column in zip(*(real or lines), strict=True))
    return _Prices(believed_latency, believed_per_byte, latency + startup, per_byte, ramp)


def ring_rate(link: Link, ranks: int) -> float:
    """Bytes/s of a ring of `ranks` on this link; between two known sizes of a ring by the logarithm of its ranks."""
    if not link.traits.ring_rates:
        return link.bytes_per_second
    known, rates = zip(*link.traits.ring_rates, strict=True)
    return float(np.exp(np.interp(math.log(ranks), np.log(known), np.log(rates))))


@functools.lru_cache(maxsize=4096)
def _within_node(kind: str, ranks: int, link: Link) -> _Prices:
    traits = link.traits
    rate = ring_rate(link, ranks)
    measured = measured_line(link, kind, ranks, ALGORITHMS)
    if kind in ("all_to_all", "neighbours"):
        # a pair starts when both are there: the launch of a group does not wait for the last of many ranks
        startup = 0.0 if measured or kind == "neighbours" else traits.startup_seconds
        return _prices([measured or _pairs_within_node(kind, ranks, link, rate)], startup, 0.0)
    multicast = kind == "all_reduce" and traits.multicast_fraction > 0 and ranks >= MULTICAST_RANKS
    algorithms = ("Ring", "NVLS") if multicast and measured is None else ("Ring",)
    lines = _tuner(_tuned(kind), Group(ranks=ranks, nodes=1), link, rate, algorithms)
    believed = list(lines.values())
    if measured is not None:  # in place of Simple, startup included; LL and LL128 keep their share of its rate
        scale = measured[1] / believed[-1][1]
        low = [(latency + traits.startup_seconds, slope * scale) for latency, slope in believed[:-1]]
        return _prices([*low, measured], 0.0, 0.0)
    real = [_real(choice, line, kind, link) for choice, line in lines.items()]
    # a ring of two has one step each way: nothing to fill behind it
    ramp = traits.ramp_seconds * min(1.0, (ranks - 1) / 3)
    return _prices(believed, traits.startup_seconds, ramp, real)


def _real(choice: Choice, line: Line, kind: str, link: Link) -> Line:
    """What a choice inside a node costs, of what NCCL believes."""
    latency, per_byte = line
    traits = link.traits
    if choice[0] == "NVLS":
        return latency, 1.0 / (traits.multicast_fraction * link.bytes_per_second)
    if choice == ("Ring", "LL128"):
        per_byte *= BELIEVED_LL128 / traits.ll128_efficiency
    passes = 2.0 if kind == "all_reduce" else 1.0
    return latency, per_byte + passes * traits.pass_seconds_per_byte


def _tuned(kind: str) -> TunedKind:
    tuned: dict[str, TunedKind] = {
        "all_reduce": "all_reduce",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "broadcast": "broadcast",
    }
    return tuned[kind]


def _tuner(
    kind: TunedKind, group: Group, link: Link, bus: float, algorithms: tuple[str, ...], nic_seconds: float = 0.0
) -> dict[Choice, Line]:
    """The tuner's lines of these algorithms in seconds, with `bus` bytes/s over all channels."""
    traits = link.traits
    channel = bus / traits.channels * 1e-9
    fabric = Fabric(
        generation=traits.generation,
        channels=traits.channels,
        intra_GBps=channel,
        inter_GBps=channel,
        intra="nvlink" if traits.interface == "nvlink" else "pci",
        nic_latency_us=nic_seconds * 1e6,
        nvls_channels=traits.channels,
        pat=True,
    )
    return {
        choice: (latency * 1e-6, 1e-9 / rate)
        for choice, (latency, rate) in tuner_lines(kind, group, fabric).items()
        if choice[0] in algorithms
    }


def _pairs_within_node(kind: str, ranks: int, link: Link, rate: float) -> Line:
    """All-to-all: every pair at once; neighbours: one pair, which a mesh of links gives one link."""
    traits, latency = link.traits, POINT_TO_POINT_SECONDS
    if kind == "neighbours":
        return latency, 1.0 / (traits.pair_bytes_per_second or rate)
    if traits.pair_bytes_per_second:
        return latency, 1.0 / (ranks * traits.pair_bytes_per_second)
    return latency, (ranks - 1) / ranks / (traits.pair_fraction * rate)


@functools.lru_cache(maxsize=4096)
def _across_nodes(kind: str, topology: GroupTopology, devices_per_node: int, intra: Link, inter: Link) -> _Prices:
    fit = next((f for f in inter.fits if (f.kind, f.ranks) == (kind, topology.ranks)), None)
    if fit is not None:
        return _prices([(fit.latency_seconds, 1.0 / fit.bytes_per_second)], 0.0, 0.0)
    traits = inter.traits
    startup = intra.traits.startup_seconds + traits.startup_seconds
    busy = topology.ranks_per_node * topology.groups_per_node
    whole = ring_rate(inter, busy) if traits.ring_rates else inter.bytes_per_second * devices_per_node
    node_rate = whole / topology.groups_per_node
    nic_seconds = max(0.0, inter.latency_seconds - TUNER_NETWORK_HOP_SECONDS)
    if kind == "all_to_all":
        return _prices([_all_to_all_across_nodes(topology, node_rate, nic_seconds)], 0.0, 0.0)
    if kind == "neighbours":
        rate = node_rate * traits.pair_fraction
        return _prices([(NETWORK_PAIR_SECONDS + nic_seconds, 1.0 / rate)], traits.startup_seconds, 0.0)
    real = _streams_across_nodes(kind, topology, node_rate, intra, inter)
    seen = traits.believed_bytes_per_second * devices_per_node / topology.groups_per_node
    believed = _streams_across_nodes(kind, topology, seen, intra, inter) if seen else real
    paid = [
        (latency, per_byte * (BELIEVED_LL / traits.ll_efficiency if choice == ("Ring", "LL") else 1.0))
        for choice, (latency, per_byte) in real.items()
    ]
    return _prices(list(believed.values()), startup, traits.ramp_seconds + traits.ramp_bytes / whole, paid)


def _streams_across_nodes(
    kind: str, topology: GroupTopology, node_rate: float, intra: Link, inter: Link
) -> dict[Choice, Line]:
    """Rings cross each node's boundary once each way; trees of more than two nodes send the buffer up and down."""
    tuned, group = _tuned(kind), Group(ranks=topology.ranks, nodes=topology.nodes)
    if group.ranks % group.nodes:  # groups of unequal nodes: as if every node held the most
        group = Group(ranks=topology.ranks_per_node * topology.nodes, nodes=topology.nodes)
    nic_seconds = max(0.0, inter.latency_seconds - TUNER_NETWORK_HOP_SECONDS)
    bus = node_rate if topology.ranks_per_node == 1 else min(node_rate, ring_rate(intra, topology.ranks_per_node))
    lines = _tuner(tuned, group, intra, bus, ("Ring", "PAT"), nic_seconds)
    if kind == "all_reduce":
        latency, per_byte = lines["Ring", "Simple"]
        lines["Ring", "Simple"] = latency * PLATEAU, per_byte
        tree_bus = node_rate * (2.0 / TREE_FRACTION if inter.traits.double_tree and topology.nodes == 2 else 1.0)
        lines |= _tuner(tuned, group, intra, tree_bus, ("Tree",), nic_seconds)
    return {choice: line for choice, line in lines.items() if inter.traits.ll128 or choice[1] != "LL128"}


def _all_to_all_across_nodes(topology: GroupTopology, node_rate: float, nic_seconds: float) -> Line:
    """Each rank sends (n - g) / n of its buffer over its share of the NICs."""
    n, g, k = topology.ranks, topology.ranks_per_node, topology.nodes
    latency = float(np.interp(k, ALL_TO_ALL_NODES, ALL_TO_ALL_SECONDS)) + nic_seconds
    rate = (1.0 - ALL_TO_ALL_NETWORK_LOSS / k) * node_rate / g
    return latency, (n - g) / n / rate
