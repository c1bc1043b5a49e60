"""What NCCL's own tuner believes that a collective takes: seconds = latency + bytes / rate, per algorithm and protocol.

NCCL picks an algorithm (ring, tree, NVLS, ...) and a protocol (LL, LL128, Simple) for each call by this model of its
own; we port the model, so that we know what it picks and why. For a ring of n ranks on k nodes

    latency = base + (steps - inter) * intra_hop + inter * inter_hop,   steps = 2(n-1) or n-1,  inter = 2(k-1) or k-1
    rate    = channels * channel_rate * efficiency(protocol) * n / steps

    fabric = Fabric(generation="Hopper", channels=18, intra_GBps=20.0, inter_GBps=20.0)
    tuner_seconds("all_gather", 32 * 2**20, Group(ranks=8, nodes=1), fabric)     # 113.7e-6: Ring Simple

A tuner is a belief, not a measurement: it knows no ramp of a filling pipeline and no launch. Bytes count the full
buffer (output of an all-gather). Source: NVIDIA/nccl src/graph/tuning.cc @5067397, constants in nccl_tuner.json.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.hardware.hosts import HARDWARE_DIRECTORY

Generation: TypeAlias = Literal["Volta", "Ampere", "Hopper", "Blackwell"]
TunedKind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"]
Algorithm: TypeAlias = Literal["Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"]
Protocol: TypeAlias = Literal["LL", "LL128", "Simple"]
Seconds: TypeAlias = NDArray[np.float64]
Choice: TypeAlias = tuple[Algorithm, Protocol]

PROTOCOLS: tuple[Protocol, ...] = ("LL", "LL128", "Simple")
ALGORITHMS_OF: Mapping[TunedKind, tuple[Algorithm, ...]] = {
    "all_reduce": ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"),
    "all_gather": ("Ring", "CollNetDirect", "NVLS", "PAT"),
    "reduce_scatter": ("Ring", "CollNetDirect", "NVLS", "PAT"),
    "broadcast": ("Ring",),
    "reduce": ("Ring",),
}
TREE_FRACTION = 0.92
"""tuning.cc: part of the rate of a ring that a tree reaches."""
SIMPLE_ONLY = frozenset(("CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What NCCL's search over the topology hands to the tuner; rates are of one channel, in GB/s per direction."""

    generation: Generation
    channels: int
    """Channels of rings and trees."""
    intra_GBps: float
    inter_GBps: float
    """Between nodes. Two nodes are priced by `intra_GBps`, which then is what the NICs let through."""
    intra: Literal["nvlink", "pci"] = "nvlink"
    cpu: Literal["intel", "amd"] = "intel"
    nic_latency_us: float = 0.0
    """Added by a NIC to each hop between nodes."""
    nvls_channels: int = 0
    """0: no multicast in the switch."""
    ll128: bool = True
    """Needs NVLink inside a node and NICs behind the same PCI switch."""
    pat: bool = False
    """Releases from 2.23 on, where each node has one rank."""
    collnet: bool = False
    """The network reduces (SHARP)."""
    same_channels: bool = True
    """All channels run along the same ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of one communicator: `ranks` on `nodes` nodes, equally many on each."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> float:
        """Ranks on one node."""
        return self.ranks / self.nodes


@dataclass(frozen=True, slots=True)
class _Constants:
    source: str
    base_latency_us: dict[str, dict[str, float]]
    hop_latency_us: dict[str, dict[str, dict[str, float]]]
    ll_max_GBps_one_node: dict[str, float]
    ll_max_GBps_network: dict[str, list[float]]
    channel_max_GBps: dict[str, dict[str, list[float]]]
    nvls_efficiency: dict[str, float]
    net_overhead_us: dict[str, float]
    tree_correction: dict[str, list[float]]


@functools.cache
def _constants() -> _Constants:
    return msgspec.json.decode((HARDWARE_DIRECTORY / "nccl_tuner.json").read_bytes(), type=_Constants)


def tuner_lines(kind: TunedKind, group: Group, fabric: Fabric) -> dict[Choice, tuple[float, float]]:
    """(latency in us, rate in GB/s of the full buffer) of every algorithm and protocol that NCCL may take."""
    lines = {}
    for algorithm in ALGORITHMS_OF[kind]:
        for protocol in PROTOCOLS:
            if _allowed(algorithm, protocol, group, fabric):
                rate = _rate(kind, algorithm, protocol, group, fabric)
                if rate > 0:
                    lines[algorithm, protocol] = (_latency(kind, algorithm, protocol, group, fabric), rate)
    return lines


def tuner_times(kind: TunedKind, nbytes: ArrayLike, group: Group, fabric: Fabric) -> dict[Choice, Seconds]:
    """Seconds of every algorithm and protocol; arrays of the shape of `nbytes`."""
    sizes = np.asarray(nbytes, np.float64)
    times = {}
    for (algorithm, protocol), (latency, rate) in tuner_lines(kind, group, fabric).items():
        slowdown, plateau = 1.0 / _correction(kind, algorithm, protocol, sizes), np.ones_like(sizes)
        if (kind, algorithm, protocol) == ("all_reduce", "Ring", "Simple") and group.nodes > 1:
            factor = 1.9 if fabric.generation == "Volta" else 1.4  # "plateau effect of ring"
            plateau = np.where(sizes / (fabric.channels * group.ranks) >= 64, factor, 1.0)
        times[algorithm, protocol] = (latency * plateau + sizes / (1e3 * rate) * slowdown) * 1e-6
    return times


def tuner_seconds(kind: TunedKind, nbytes: ArrayLike, group: Group, fabric: Fabric) -> Seconds:
    """Seconds of the algorithm and protocol that NCCL takes: the least of `tuner_times`."""
    minimum: Seconds = np.min(np.stack(list(tuner_times(kind, nbytes, group, fabric).values())), axis=0)
    return minimum


def _allowed(algorithm: Algorithm, protocol: Protocol, group: Group, fabric: Fabric) -> bool:
    if algorithm in SIMPLE_ONLY and protocol != "Simple":
        return False
    if protocol == "LL128" and not (fabric.ll128 and (fabric.intra == "nvlink" or group.per_node == 1)):
        return False
    across = group.nodes > 1
    return {
        "NVLS": fabric.nvls_channels >= 2 and not across and group.per_node > 1,
        "NVLSTree": fabric.nvls_channels >= 2 and across and group.per_node > 1,
        "PAT": fabric.pat and group.per_node == 1,
        "CollNetDirect": fabric.collnet and across and fabric.intra == "nvlink",
        "CollNetChain": fabric.collnet and across,
    }.get(algorithm, True)


def _by_nodes(table: Mapping[str, list[float]], fabric: Fabric, group: Group) -> float:
    """Entry for one, two, or more nodes."""
    return table[fabric.generation][min(group.nodes, 3) - 1]


def _rate(kind: TunedKind, algorithm: Algorithm, protocol: Protocol, group: Group, fabric: Fabric) -> float:
    """GB/s of the full buffer: bus rate of all channels, then bytes of the buffer per byte on the bus."""
    if algorithm in ("NVLS", "NVLSTree"):
        bus = _nvls_bus(kind, algorithm, group, fabric)
    else:
        near = group.nodes <= 2 or algorithm.startswith("CollNet")
        bus = fabric.channels * (fabric.intra_GBps if near else fabric.inter_GBps)
        bus = _efficient(kind, algorithm, protocol, bus, group, fabric)
    if algorithm != "Ring" and kind in ("all_gather", "reduce_scatter"):
        return bus
    through = {"Ring", "NVLS", "NVLSTree"}
    return bus * (group.ranks / _steps(kind, group.ranks) if algorithm in through else 0.5)


def _steps(kind: TunedKind, ranks: int) -> int:
    return {"all_reduce": 2 * (ranks - 1), "all_gather": ranks - 1, "reduce_scatter": ranks - 1}.get(kind, ranks)


def _nvls_bus(kind: TunedKind, algorithm: Algorithm, group: Group, fabric: Fabric) -> float:
    """Multicast and reduction in the switch; one channel in `nvls_channels` is spent on control."""
    channels = fabric.nvls_channels
    intra = fabric.intra_GBps * _constants().nvls_efficiency[fabric.generation] * (channels - 1) / channels
    intra *= 2.0 if kind == "all_reduce" else (group.per_node - 1) / group.per_node
    if algorithm == "NVLS":
        return channels * intra
    inter = fabric.inter_GBps * (2 if group.nodes == 2 else 1)
    ceiling = _by_nodes(_constants().channel_max_GBps["nvls_tree"], fabric, group)
    return channels * min(intra, inter, ceiling)


def _efficient(
    kind: TunedKind, algorithm: Algorithm, protocol: Protocol, bus: float, group: Group, fabric: Fabric
) -> float:
    """The bus rate that is left to data: flags of LL and LL128, depth of trees, ceilings of one channel."""
    ceilings, channels = _constants().channel_max_GBps, fabric.channels
    if algorithm == "Ring":
        if protocol == "LL":
            return min(_ll_max(group, fabric), 0.5 * bus)
        if protocol == "LL128":
            return min(0.92 * bus, channels * _by_nodes(ceilings["ring_ll128"], fabric, group))
    if algorithm == "Tree":
        bus = min(TREE_FRACTION * bus, channels * _by_nodes(ceilings["tree"], fabric, group))
        if protocol == "LL":
            return min(bus / 3.8, _ll_max(group, fabric))
        if protocol == "LL128":
            share = 7 / 9 if group.nodes == 1 else 120 / 128
            return min(bus * share, channels * _by_nodes(ceilings["tree_ll128"], fabric, group))
    if algorithm == "PAT":
        return 0.75 * bus
    if algorithm == "CollNetDirect":
        return _collnet_direct(kind, bus, group, fabric)
    return bus


def _collnet_direct(kind: TunedKind, bus: float, group: Group, fabric: Fabric) -> float:
    if kind != "all_reduce":
        return group.per_node * min(fabric.intra_GBps, 0.9 * fabric.inter_GBps)
    ranks_per_nic = group.per_node / fabric.channels
    bus /= ranks_per_nic - (ranks_per_nic - 1) / 2
    return bus * (0.85 if fabric.generation in ("Hopper", "Blackwell") else 1.0)


def _ll_max(group: Group, fabric: Fabric) -> float:
    """LL is bound by the GPU inside a node, by the CPU that serves the NICs between nodes."""
    if group.nodes == 1:
        return _constants().ll_max_GBps_one_node[fabric.generation]
    return _constants().ll_max_GBps_network[fabric.cpu][min(group.nodes, 3) - 2]


def _latency(kind: TunedKind, algorithm: Algorithm, protocol: Protocol, group: Group, fabric: Fabric) -> float:
    hops = _constants().hop_latency_us
    base = _constants().base_latency_us[algorithm][protocol]
    intra = hops[fabric.intra][algorithm][protocol]
    # with one rank per node nothing hides a NIC's latency: NCCL takes the tree's
    inter = hops["network"]["Tree" if group.per_node == 1 else algorithm][protocol]
    inter += fabric.nic_latency_us * (2 if protocol == "Simple" else 1)
    levels = math.floor(math.log2(group.nodes))
    inner_ranks = int(group.per_node) - 1
    if algorithm == "Ring":
        return base + _ring_latency(kind, protocol, intra, inter, group, fabric)
    if algorithm == "Tree":
        return base + 2 * (inner_ranks * intra + levels * inter)
    if algorithm == "CollNetDirect":
        return base + 2 * (min(1, inner_ranks) * intra + 0.4 * inner_ranks) + inter
    if algorithm == "CollNetChain":
        return base + 2 * inner_ranks * intra + inter
    if algorithm == "PAT":
        return base + levels * inter / 3.5 + 2.8 * group.ranks
    return base + intra + (2 * levels * inter if algorithm == "NVLSTree" else 0.0)


def _ring_latency(
    kind: TunedKind, protocol: Protocol, intra: float, inter: float, group: Group, fabric: Fabric
) -> float:
    steps = _steps(kind, group.ranks)
    if kind in ("broadcast", "reduce"):
        hops = _constants().hop_latency_us[fabric.intra if group.nodes == 1 else "network"]
        if fabric.same_channels:
            return hops["Ring"][protocol]
        return steps * hops["Tree" if protocol == "Simple" else "Ring"][protocol]
    if group.nodes > 1:  # a step inside a node is posted by the same proxy as one between nodes
        overhead = _constants().net_overhead_us[fabric.cpu] * (3 if protocol == "Simple" else 1)
        intra = max(intra, overhead)
    crossings = (2 if kind == "all_reduce" else 1) * (group.nodes - 1)
    return (steps - crossings) * intra + crossings * inter


def _correction(kind: TunedKind, algorithm: Algorithm, protocol: Protocol, sizes: Seconds) -> Seconds:
    """Part of a tree's rate by size: powers of two from 64 bytes to 256 MiB."""
    if (kind, algorithm) != ("all_reduce", "Tree"):
        return np.ones_like(sizes)
    table = np.array([*_constants().tree_correction[protocol], 1.0])
    powers = np.floor(np.log2(np.maximum(np.floor(sizes / 64), 1))).astype(int)
    factors: Seconds = np.where(sizes < 64, 1.0, table[np.minimum(powers, len(table) - 1)])
    return factors
