"""The commands that make nodes: namespaces, their addresses and routes. Values only; `lab.py` runs them.

    node_commands(0)      link set lo up, ..., what `ip -n NAME -batch -` reads

MTU 9000 carries 1 Gbit/s with few packets. TCP uses cubic: where the machine's default is BBR, its probing of rates
would blur what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.netlab.presets import Network

DEVICE = "net0"
SUBNET = "10.78.0.0/24"
MTU = 9000
QUEUE_PACKETS = 2000
"""Of the device: what TCP sends in one go must not be dropped before it is shaped."""


def address(node: int) -> str:
    """The address of a node inside of the lab."""
    return f"10.78.0.{node + 1}"


def node_commands(node: int) -> list[str]:
    """What `ip -batch` does inside of a node's namespace once the switch has opened its device."""
    return [
        "link set lo up",
        f"link set {DEVICE} mtu {MTU} txqueuelen {QUEUE_PACKETS} up",
        f"address add {address(node)}/24 dev {DEVICE}",
        f"route change {SUBNET} dev {DEVICE} src {address(node)} congctl cubic",
    ]


def switch_command(
    program: Path, counters: Path, network: Network, namespaces: Sequence[str], life_seconds: float
) -> list[str]:
    """The switch in front of everything else: a late packet is a slower network. It ends with the lab."""
    links = [text for name, mbit in zip(namespaces, network.node_mbit, strict=True) for text in (name, f"{mbit:g}")]
    numbers = [f"{network.latency_us:g}", f"{life_seconds:g}"]
    return ["setpriv", "--pdeathsig", "KILL", "chrt", "-r", "2", str(program), str(counters), *numbers, *links]


def rank_environment(network: Network, rank: int, port: int) -> dict[str, str]:
    """What torchrun would set, and the device that gloo listens on. Rank 0 is on node 0, the rendezvous."""
    node, local = divmod(rank, network.ranks_per_node)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(network.num_ranks),
        "LOCAL_WORLD_SIZE": str(network.ranks_per_node),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "TP_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
    }


def rank_command(namespace: str, command: Sequence[str]) -> list[str]:
    """A command inside of a node; it ends with the lab that started it."""
    return ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace, *command]
