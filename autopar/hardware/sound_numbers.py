"""Sound numbers: what no machine has is refused by the name of its entry, before something is priced by it.

    check_numbers(cluster)      ConfigurationError: inter_link.bytes_per_second is 0: write a positive number

Counts, rates and what is divided by must be above 0. All other numbers (latencies, sizes, shares) are 0 or more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from autopar.errors import ConfigurationError
from autopar.hardware.device_curves import DeviceCurves

POSITIVE = frozenset({
    "num_nodes", "devices_per_node", "ranks", "nodes", "ranks_per_node", "world_size", "overlap_slowdown", "slowdown",
    "memory_bytes", "memory_bytes_per_second", "bytes_per_second", "flops_per_second",
    "launch_seconds", "operator_seconds", "seconds", "work",
    "to_host_bytes_per_second", "from_host_bytes_per_second", "both_bytes_per_second", "devices_per_link",
    "read_bytes_per_second", "write_bytes_per_second",
})  # fmt: skip
"""Names of fields whose numbers are above 0, also where a field holds several of them."""

FITTED = (DeviceCurves,)
"""Constants of our own fits, which may have any sign."""


def check_numbers(record: object) -> None:
    """Raises ConfigurationError naming the entry, for a number of a dataclass that no machine has."""
    for entry, field, value in _numbers(record, "", ""):
        if not math.isfinite(value) or value < 0 or (field in POSITIVE and value == 0):
            meant = "a positive number" if field in POSITIVE else "0 or more"
            raise ConfigurationError(f"{entry} is {value}: write {meant}")


def _numbers(value: object, entry: str, field: str) -> Iterator[tuple[str, str, float]]:
    """(where, field of a dataclass, number) of everything inside."""
    if isinstance(value, FITTED):
        return
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield entry, field, value
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _numbers(getattr(value, each.name), f"{entry}.{each.name}".lstrip("."), each.name)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{entry}.{name}", field)
    elif isinstance(value, tuple):
        for place, inner in enumerate(value):
            yield from _numbers(inner, f"{entry}[{place}]", field)
