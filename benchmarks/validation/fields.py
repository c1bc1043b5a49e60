"""Reading the fields of a row: numbers and flags as measurement files write them, or a reason why not.

integer(row, "tp", 1)                    # "" and "n/a" are the default; "64 (0)" is 64
flag(row, "sequence_parallel")           # "True", "1" and "yes" are true
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from autopar.hardware.cluster import Cluster
from autopar.hardware.devices import NodePreset, find_node, find_node_of_gpu


class Unpredictable(ValueError):
    """A row that says too little, or says what no model here covers; the message is the row's reason."""


Row = Mapping[str, str]
_ABSENT = ("", "n/a", "na", "none", "-", "nan")


def text(row: Row, column: str, default: str = "") -> str:
    """The field, or the default where it is absent."""
    value = row.get(column, "").strip()
    return default if value.lower() in _ABSENT else value


def number(row: Row, column: str, default: float | None = None) -> float:
    """The first number of a field; a second one in parentheses belongs to a variant of the run.

    Raises Unpredictable where the field has none and there is no default.
    """
    value = text(row, column)
    found = re.match(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", value)
    if found:
        return float(found[0])
    if default is None or value:
        raise Unpredictable(f"{column} is {value!r}, expected a number")
    return default


def integer(row: Row, column: str, default: int | None = None) -> int:
    """The same for whole numbers."""
    value = number(row, column, default)
    if value != int(value):
        raise Unpredictable(f"{column} is {value:g}, expected a whole number")
    return int(value)


def flag(row: Row, column: str) -> bool:
    """Whether a field says yes."""
    return text(row, column).lower() in ("true", "1", "1.0", "yes")


def cluster_of(name: str, devices: int, rate: str = "") -> Cluster:
    """`devices` of a device or node type, in as few equal nodes as the type allows; `rate` as "800Gb" a node.

    256 of a rack of 72 are 4 racks of 64. Raises ConfigurationError for unknown names.
    """
    return cluster_of_node(find_node(name), devices, name, rate)


def cluster_of_gpu(driver_name: str, devices: int) -> Cluster:
    """The same by the name that the GPU's driver reports: "NVIDIA_A100-PCIE-40GB"."""
    node = find_node_of_gpu(driver_name.replace("_", " "))
    return cluster_of_node(node, devices, node.device, "")


def cluster_of_node(node: NodePreset, devices: int, name: str, rate: str) -> Cluster:
    """The cluster of this many devices of a node type."""
    per_node = max(size for size in range(1, min(devices, node.devices_per_node) + 1) if devices % size == 0)
    suffix = f" @ {rate}" if rate else ""
    return Cluster.parse(f"{devices // per_node}x{per_node} {name}{suffix}")


def whole(dividend: int, divisor: int, what: str) -> int:
    """The quotient. Raises Unpredictable where it is not whole and positive."""
    if divisor < 1 or dividend < 1 or dividend % divisor:
        raise Unpredictable(f"{what}: {dividend} does not divide by {divisor}")
    return dividend // divisor


def smallest_world(devices: int, *products: int) -> int:
    """`devices`, or the fewest that each product of parallel degrees divides where the file names fewer."""
    needed = math.lcm(*products)
    return devices if devices % needed == 0 else needed
