"""Dispatch and combine of mixture-of-experts tokens (DeepEP): rate of the bottleneck and latency of one call.

Seconds are those of the planner's all-to-all (`collective_seconds`) for the bytes that travel (`token_routes.py`):
normal kernels forward, low-latency kernels send every row straight. What is published divides the bytes of the
bottleneck by the time, those that stay with the rank (or, over the NICs, in the node) too:

    rate = tokens x copies x hidden x bytes / seconds            (tests/test_intranode.py, test_internode.py @dd758ca)

No constant is fitted on DeepEP but the part of the H800's NVLink (`links.json`). Its kernels write to NICs themselves,
so that between nodes no message waits for a host (`gpu_initiated`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.cost_models.nccl import NETWORK_PAIR_SECONDS, TUNER_NETWORK_HOP_SECONDS
from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import CollectiveFit
from autopar.hardware.group_topology import GroupTopology
from benchmarks.validation.collective_machines import read_machine
from benchmarks.validation.collective_profiles import nominal
from benchmarks.validation.fields import Unpredictable, integer, number
from benchmarks.validation.schemas import Tier
from benchmarks.validation.token_routes import Leg, forwarded, straight

EXPERTS = 256
"""DeepSeek-V3's, which DeepEP's tables and tests take."""
LARGE_BYTES = 2.0**30
"""Where an all-to-all takes its seconds per byte and nothing else counts."""
MOST_NODES = 4
"""DeepSeek-V3's routing sends a token to at most 4 nodes; normal kernels are measured so (docs/legacy.md @dd758ca)."""
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
    token_bytes = number(row, "tokens_per_rank") * number(row, "hidden") * width
    if token_bytes <= 0:
        raise Unpredictable(f"{token_bytes:g} bytes are no exchange")
    cluster = nominal(machine, ranks, nodes) if tier == "physics" else machine.cluster(ranks=ranks, nodes=nodes)
    legs = _legs(row, token_bytes, ranks, nodes)
    seconds = max(leg.seconds(gpu_initiated(leg, cluster)) for leg in legs)
    return {"bottleneck_GBps": _counted(row, legs).nbytes / seconds * 1e-9, "latency_us": seconds * 1e6}


def gpu_initiated(leg: Leg, cluster: Cluster) -> Cluster:
    """The cluster with kernels that post their messages themselves: an all-to-all of the leg's ranks keeps its seconds
    per byte, and starts as one pair does, where NCCL's host posts a message for each peer."""
    if leg.topology.nodes == 1:
        return cluster
    link = cluster.inter_link
    one, two = (replace(leg, nbytes=nbytes).seconds(cluster) for nbytes in (LARGE_BYTES, 2 * LARGE_BYTES))
    start = NETWORK_PAIR_SECONDS + max(0.0, link.latency_seconds - TUNER_NETWORK_HOP_SECONDS)
    line = CollectiveFit(
        kind="all_to_all", ranks=leg.topology.ranks, latency_seconds=start, bytes_per_second=LARGE_BYTES / (two - one)
    )
    return replace(cluster, inter_link=replace(link, fits=(line,)))


def _legs(row: Mapping[str, str], token_bytes: float, ranks: int, nodes: int) -> tuple[Leg, ...]:
    library, per_token = row["lib"].lower(), integer(row, "topk")
    topology = GroupTopology(ranks=ranks, nodes=nodes, ranks_per_node=-(-ranks // nodes), groups_per_node=1)
    if "low-latency" in library:
        return (straight(token_bytes, per_token, topology),)
    limited = nodes > 1 and " v2" not in library  # "TODO: support top-k groups", tests/elastic/test_ep.py
    inside, across = forwarded(token_bytes, EXPERTS, per_token, topology, MOST_NODES if limited else None)
    return (inside,) if nodes == 1 else (inside, across)


def _counted(row: Mapping[str, str], legs: tuple[Leg, ...]) -> Leg:
    """The leg whose bytes a row divides by the time: NVLink's or the NICs'."""
    return legs[0] if "nvlink" in row.get("bottleneck", "").lower() else legs[-1]
