"""Dispatch and combine of mixture-of-experts tokens (DeepEP): rate of the bottleneck and latency of one call.

A rank sends each of its tokens to the top-k experts' ranks: `tokens * topk * hidden * bytes`. The published rate
divides those bytes by the time, those that stay inside the node too. With k nodes a share (k-1)/k leaves the node, so
NICs of rate N that an exchange uses by a fraction f show up as

    rate = f * N * k / (k - 1)

Inside a node the link's pairs are the bottleneck. High-throughput kernels forward each token once per node; low-latency
kernels send from every rank to every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.validation.collective_machines import read_machine
from benchmarks.validation.collective_profiles import nominal
from benchmarks.validation.fields import Unpredictable, integer, number
from benchmarks.validation.schemas import Tier

THROUGHPUT_FRACTION = 0.87
LATENCY_FRACTION = 0.76
"""Part of the NIC that normal and low-latency kernels reach: DeepEP docs/legacy.md @dd758ca, EP 32 and 128, H800."""
LATENCY_INTRA_FRACTION = 0.70
"""Part of the NVLink that low-latency kernels reach, the same file, EP 8 (98 and 127 of 160 GB/s)."""
_BYTES = {"fp8": 1.0 + 4.0 / 128, "bf16": 2.0}
"""Per element; fp8 carries a float32 scale per 128 elements."""


def predict_exchange(row: Mapping[str, str], tier: Tier) -> dict[str, float | str]:
    """`bottleneck_GBps` and `latency_us` of a dispatch or combine among `ep` ranks.

    Raises ConfigurationError where the text names no known GPU, Unpredictable where the payload has no known width.
    """
    machine = read_machine(row["hw"])
    ranks = integer(row, "ep")
    nodes = max(1, ranks // machine.node.devices_per_node)
    width = next((width for name, width in _BYTES.items() if name in row["op"]), None)
    if width is None:
        raise Unpredictable(f"operation {row['op']!r} names no payload of {', '.join(_BYTES)}")
    if tier == "physics":
        cluster, wide, small, inner = nominal(machine, ranks, nodes), 1.0, 1.0, 1.0
        pairs = cluster.intra_link.bytes_per_second
    else:
        cluster = machine.cluster(ranks=ranks, nodes=nodes)
        wide, small, inner = THROUGHPUT_FRACTION, LATENCY_FRACTION, LATENCY_INTRA_FRACTION
        pairs = cluster.intra_link.bytes_per_second * cluster.intra_link.traits.pair_fraction
    low_latency = "low-latency" in row["lib"].lower()
    if nodes == 1:
        rate = cluster.intra_link.bytes_per_second * inner if low_latency else pairs
    else:
        nic = machine.node_bytes_per_second or machine.node.nics_per_node * machine.node.nic_bytes_per_second.value
        rate = nic / machine.node.devices_per_node * (small if low_latency else wide) * nodes / (nodes - 1)
    sent = number(row, "tokens_per_rank") * number(row, "topk") * number(row, "hidden") * width
    if sent <= 0:
        raise Unpredictable(f"{sent:g} bytes are no exchange")
    return {"bottleneck_GBps": rate * 1e-9, "latency_us": sent / rate * 1e6}
