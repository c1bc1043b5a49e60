"""The memory limit: what a user writes, as bytes per device.

budget("72GiB", cluster), budget(0.9, cluster), budget(None, cluster)      bytes, a share of the device, all it can give
"""

from __future__ import annotations

import math

from autopar.cost_models.usable_memory import usable_bytes
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster

UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "b": 1.0}


def budget(memory_limit: float | str | None, cluster: Cluster) -> float:
    """Bytes per device: a number of bytes, "72GiB", "0.8" or 0.8 of the device; default: what is usable of it."""
    usable = usable_bytes(cluster.device.memory_bytes, cluster.device.kind, common_groups(cluster))
    if memory_limit is None:
        return float(usable)
    try:
        value, is_bytes = _read_amount(memory_limit)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"memory_limit={memory_limit!r}: write bytes, '72GiB' or a fraction") from error
    if not 0 < value < math.inf:  # also what is not a number
        raise ConfigurationError(f"memory_limit={memory_limit!r} must be positive and finite")
    return value if is_bytes or value > 1 else value * usable


def common_groups(cluster: Cluster) -> tuple[int, ...]:
    """Ranks of the process groups that any plan of a cluster joins, or nearly so: all, and a node of several."""
    nodes = (cluster.devices_per_node,) if cluster.num_nodes > 1 and cluster.devices_per_node > 1 else ()
    return (cluster.num_devices, *nodes)


def number_of_bytes(amount: float | str, argument: str) -> float:
    """Of a number of bytes, or "5GB". Raises ConfigurationError naming the argument."""
    try:
        value, _ = _read_amount(amount)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{argument}={amount!r}: write bytes or '5GB'") from error
    if not 1 <= value < math.inf:
        raise ConfigurationError(f"{argument}={amount!r} must be a byte at least, and finite")
    return value


def _read_amount(limit: float | str) -> tuple[float, bool]:
    """(number, whether it said that it counts bytes): "72GiB", "500MB", "1B" say it; "1e9", 0.5 do not."""
    if isinstance(limit, bool):
        raise TypeError("a truth value is no amount")
    if not isinstance(limit, str):
        return float(limit), False
    lowered = limit.strip().lower()
    for unit, factor in UNITS.items():
        if lowered.endswith(unit):
            return float(lowered.removesuffix(unit)) * factor, True
    return float(lowered), False
