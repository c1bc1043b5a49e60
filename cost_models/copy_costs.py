"""Seconds of copies between a device and its host, and between the host and a file.

    seconds = latency + bytes / rate
    rate    = min(the link's rate / devices that share it, the host's memory rate / all copies on the node)

Every device of a node is taken to copy at once, as ranks of one program do. Where one device copies in both directions
at once, each gets its part of what the link reaches in both. `copy_seconds` is what a plan is priced by; the simulator
(`Action.link`) shares a link among those who really use it at a time.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.simulator import FROM_HOST_STREAM, TO_HOST_STREAM, Action, Interference
from autopar.graphs.copy_nodes import Direction
from autopar.hardware.hosts import Host, HostLink, Storage

STREAM_OF: dict[Direction, str] = {"to_host": TO_HOST_STREAM, "from_host": FROM_HOST_STREAM}
"""The streams of the simulator on which copies run."""


def link_rate(link: HostLink, direction: Direction, *, both_ways: bool = False) -> float:
    """Bytes per second of one device that has the link for itself; both_ways: while it copies the other way, too."""
    alone = link.to_host_bytes_per_second if direction == "to_host" else link.from_host_bytes_per_second
    if not both_ways:
        return alone
    both = link.to_host_bytes_per_second + link.from_host_bytes_per_second
    return alone * min(1.0, link.both_bytes_per_second / both)


def copy_rate(host: Host, direction: Direction, devices: int = 1, *, both_ways: bool = False) -> float:
    """Bytes per second of each of the `devices` of a node that copy at once.

    They lie as ranks do, one link after the other, so a link is shared by as many of them as it has.
    """
    sharing = min(host.link.devices_per_link, devices)
    memory = host.memory_bytes_per_second * (0.5 if both_ways else 1.0) / devices
    return min(link_rate(host.link, direction, both_ways=both_ways) / sharing, memory)


def copy_seconds(
    nbytes: ArrayLike, host: Host, direction: Direction, devices: int = 1, *, both_ways: bool = False
) -> NDArray[np.float64]:
    """Seconds of a copy of `nbytes` on each of the `devices` of a node; 0 for nothing. Shapes as `nbytes`."""
    return _line(nbytes, host.link.latency_seconds, copy_rate(host, direction, devices, both_ways=both_ways))


def file_seconds(
    nbytes: ArrayLike, storage: Storage, direction: Literal["read", "write"], devices: int = 1
) -> NDArray[np.float64]:
    """Seconds in which each of the `devices` of a node reads or writes `nbytes` of its files; 0 for nothing."""
    rate = storage.read_bytes_per_second if direction == "read" else storage.write_bytes_per_second
    return _line(nbytes, storage.latency_seconds, rate / devices)


def copy_action(
    name: str, nbytes: float, host: Host, direction: Direction, *, place: int, rank: int = 0,
    depends_on: tuple[int, ...] = (),
) -> Action:
    """A copy for the simulator, with the seconds that it takes alone. place: of its device among those of all nodes,
    node by node (`node * devices_per_node + device`); devices behind one port share its link in each direction."""
    port = f"port {place // host.link.devices_per_link}, {STREAM_OF[direction]}"
    seconds = float(copy_seconds(nbytes, host, direction))
    return Action(name, STREAM_OF[direction], seconds, depends_on, communication=True, rank=rank, link=port)


def duplex(link: HostLink) -> Interference:
    """How much longer copies take on a link while the other direction is busy, too."""
    both = link.to_host_bytes_per_second + link.from_host_bytes_per_second
    return Interference(both_ways=max(1.0, both / link.both_bytes_per_second))


def _line(nbytes: ArrayLike, latency_seconds: float, rate: float) -> NDArray[np.float64]:
    moved = np.asarray(nbytes, np.float64)
    return np.where(moved > 0.0, latency_seconds + moved / rate, 0.0)
