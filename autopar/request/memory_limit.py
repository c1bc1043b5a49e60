"""The memory limit: what a user writes, as bytes per device.

budget("72GiB", cluster), budget(0.9, cluster), budget(None, cluster)      bytes, a share of the device, all it can give
"""

from __future__ import annotations

from autopar.cost_models.device_memory import usable_bytes
from autopar.errors import ConfigurationError
from autopar.hardware.cluster import Cluster


def budget(memory_limit: float | str | None, cluster: Cluster) -> float:
    """Bytes per device: a number of bytes, "72GiB", "0.8" or 0.8 of the device; default: what is usable of it."""
    usable = usable_bytes(cluster.device.memory_bytes, cluster.device.kind)
    if memory_limit is None:
        return float(usable)
    try:
        value = parse_bytes(memory_limit)
    except ValueError as error:
        raise ConfigurationError(f"memory_limit={memory_limit!r}: write bytes, '72GiB' or a fraction") from error
    if not value > 0:  # also what is not a number
        raise ConfigurationError(f"memory_limit={memory_limit!r} must be positive")
    return value * usable if value <= 1 else value


def parse_bytes(text: float | str) -> float:
    """ "72GiB", "500MB", "1e9" or a number -> number. Raises ValueError."""
    if not isinstance(text, str):
        return float(text)
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9, "b": 1.0}
    lowered = text.strip().lower()
    for unit, factor in units.items():
        if lowered.endswith(unit):
            return float(lowered.removesuffix(unit)) * factor
    return float(lowered)
