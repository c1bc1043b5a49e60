"""When a ring is hidden, and when it is shorter than Ulysses, on paper: one causal layer forward, nothing simulated.

    hop        2 b (s/c) h_kv w / BW              a block of keys and values to the next rank
    block      4 b (s/c)^2 h / F                  attention of a block; half of it in zigzag order
    ring       (c - 1) max(0, hop - block)        what of the hops shows
    ulysses    (2 + 2 h_kv/h) b s h / c (c - 1) / c w / BW

h, h_kv: widths of queries and of keys; w: bytes of an element; F: FLOP/s of attention on a rank; BW: bytes/s of a link.
A ring is hidden from s / c = F w h_kv / (2 BW h) tokens on. Sources: arXiv 2310.01889, 2309.14509.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autopar.cost_models.operator_costs import operator_seconds
from autopar.hardware.cluster import Cluster
from benchmarks.context_parallelism.settings import ELEMENT_BYTES, Sizes
from benchmarks.netlab.presets import Network

FLOPS = 1e9
"""So much work that a launch does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForms:
    """Seconds of one layer forward."""

    hop_seconds: float
    block_seconds: float
    ring_seconds: float
    ulysses_seconds: float
    hidden_from_tokens: float
    """Of a rank's block."""

    def said(self) -> dict[str, Any]:
        """As a row has it."""
        return {**asdict(self), "winner": "ring" if self.ring_seconds < self.ulysses_seconds else "ulysses"}


def attention_rate(cluster: Cluster) -> float:
    """FLOP/s of attention on a rank."""
    seconds = operator_seconds(
        cluster.device, flops=FLOPS, bytes_moved=0.0, dtype="float32", kind="attention", operator="attention"
    )
    return FLOPS / float(seconds)


def closed_forms(sizes: Sizes, network: Network, rate: float, *, zigzag: bool) -> ClosedForms:
    """Of a setting. rate: FLOP/s. A ring crosses a node's link once per hop; of Ulysses' parts all of a node's ranks
    send what goes to others. Fewer heads of keys than ranks are repeated."""
    ranks, per_node = network.num_ranks, network.ranks_per_node
    block, width = sizes.length // ranks, sizes.width
    kv_width = width * sizes.kv_heads // sizes.heads
    sent_kv_width = kv_width * max(1, ranks // sizes.kv_heads)
    bandwidth = network.mbit * 1e6 / 8
    flops = 4 * sizes.batch * block**2 * width * (0.5 if zigzag else 1.0)
    hop = 2 * sizes.batch * block * kv_width * ELEMENT_BYTES / bandwidth
    sent = (2 * width + 2 * sent_kv_width) * sizes.batch * block * (ranks - 1) / ranks * ELEMENT_BYTES
    across = per_node * (ranks - per_node) / (ranks - 1)
    return ClosedForms(
        hop_seconds=hop,
        block_seconds=flops / rate,
        ring_seconds=(ranks - 1) * max(0.0, hop - flops / rate),
        ulysses_seconds=sent * across / bandwidth,
        hidden_from_tokens=rate * ELEMENT_BYTES * kv_width / (2 * bandwidth * width) * (2.0 if zigzag else 1.0),
    )
