"""Networks as data: nodes, ranks, rates, latency, cores. A preset is one line; a run may change single numbers.

    PRESETS["two-by-two"].name           # "2x2-200mbit-200us-0.3cores"

Ranks of one node talk over its loopback, which is not shaped: the fast inside of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.errors import ConfigurationError

MAX_NODES = 16
"""What the switch has room for."""
MAX_MBIT = 5000.0
"""Above it, the copies of packets take more time than the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """`nodes` nodes of `ranks_per_node` ranks each, behind one switch."""

    nodes: int
    ranks_per_node: int
    mbit: float
    """Rate of a node's link, per direction, in 10^6 bits per second."""
    latency_us: float
    """One way, from node to node."""
    cores_per_rank: float | None = 0.3
    """Share of a core that a rank gets, never more, even where cores idle; None: what the machine has left. Four ranks
    of 0.3 leave 0.8 of two cores to the switch and the kernel: with 0.5, an all_reduce of 8 MiB at 1 Gbit/s takes 225
    ms instead of 157, as packets wait for a processor, and products beside it 3.6 times as long instead of 1.6."""
    slow_nodes: Mapping[int, float] = field(default_factory=dict)
    """Node -> its own rate in Mbit/s."""

    def __post_init__(self) -> None:
        if not (1 <= self.nodes <= MAX_NODES and self.ranks_per_node >= 1):
            raise ConfigurationError(
                f"{self.nodes} nodes x {self.ranks_per_node} ranks: 1 to {MAX_NODES} nodes, 1 or more ranks on each"
            )
        if self.cores_per_rank is not None and self.cores_per_rank < 0.1:
            raise ConfigurationError(f"{self.cores_per_rank} cores per rank: the scheduler shares out 0.1 or more")
        if self.latency_us < 0:
            raise ConfigurationError(f"a latency of {self.latency_us} us: 0 or more")
        for node, mbit in {0: self.mbit, **self.slow_nodes}.items():
            if not 0 <= node < self.nodes:
                raise ConfigurationError(f"there is no node {node} among {self.nodes}")
            if not 0 < mbit <= MAX_MBIT:
                raise ConfigurationError(f"{mbit:g} Mbit/s of node {node}: above 0, at most {MAX_MBIT:g}")

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def node_mbit(self) -> tuple[float, ...]:
        """The rate of every node."""
        return tuple(self.slow_nodes.get(node, self.mbit) for node in range(self.nodes))

    @property
    def name(self) -> str:
        """All numbers in one word: what a profile measured on this network is filed under."""
        cores = "" if self.cores_per_rank is None else f"-{self.cores_per_rank:g}cores"
        slow = "".join(f"-node{node}at{mbit:g}" for node, mbit in sorted(self.slow_nodes.items()))
        return f"{self.nodes}x{self.ranks_per_node}-{self.mbit:g}mbit-{self.latency_us:g}us{cores}{slow}"


PRESETS: Mapping[str, Network] = {
    "flat-200mbit": Network(nodes=4, ranks_per_node=1, mbit=200.0, latency_us=200.0),
    "flat-1gbit": Network(nodes=4, ranks_per_node=1, mbit=1000.0, latency_us=50.0),
    "slow-wan": Network(nodes=4, ranks_per_node=1, mbit=50.0, latency_us=10_000.0),
    "two-by-two": Network(nodes=2, ranks_per_node=2, mbit=200.0, latency_us=200.0),
    "two-by-two-1gbit": Network(nodes=2, ranks_per_node=2, mbit=1000.0, latency_us=50.0),
    "slow-node": Network(nodes=4, ranks_per_node=1, mbit=200.0, latency_us=200.0, slow_nodes={3: 50.0}),
}
