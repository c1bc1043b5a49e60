"""The memory ladder of a plan: where what backward reads of forward waits, what that holds, and what it costs.

    rung                 values   at the peak  costs per step
    kept on the device   4.2 GiB  4.2 GiB
    recomputed           8.1 GiB  0.5 GiB      61.2 ms
    on the host          5.5 GiB  0.3 GiB      2.10 ms

A rung costs what the played step is longer for what the program has for its sake: kernels that run again with their
exposed collectives, copies that nothing hides, the optimizer's step on the host. Costs of two rungs may hide behind
each other, so they need not add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from autopar.plans.plan_text import align, format_bytes, format_seconds

MOST_MOMENTS = 30
"""Lines of the table over time; the value holds all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way. bytes: of all its values, each once, in one micro-batch (of parameters: with gradients and states);
    peak_bytes: of these on the device at the fullest moment of the step; seconds: per step."""

    name: str
    bytes: float
    peak_bytes: float
    seconds: float

    @property
    def row(self) -> tuple[str, str, str, str]:
        """As words of a table's row."""
        return (
            self.name,
            format_bytes(self.bytes),
            format_bytes(self.peak_bytes) if self.peak_bytes else "",
            format_seconds(self.seconds) if self.seconds else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLadder:
    """Of one rank, in bytes. over_time: (moment, rung -> bytes on the device, bytes on the host), moments as of
    `MemoryTable.over_time`; host_peak_bytes: the most of the latter; host_limit_bytes: a device's part of the host."""

    rungs: tuple[Rung, ...]
    over_time: tuple[tuple[str, Mapping[str, float], float], ...] = ()
    host_peak_bytes: float = 0.0
    host_limit_bytes: float | None = None

    def lines(self) -> list[str]:
        """The table of rungs, and that of their bytes over time."""
        found = [align(("rung", "values", "at the peak", "costs per step"), [rung.row for rung in self.rungs])]
        if self.host_peak_bytes:
            there = None if self.host_limit_bytes is None else format_bytes(self.host_limit_bytes)
            limit = f" of {there} for each device" if there else ""
            found.append(f"the host holds {format_bytes(self.host_peak_bytes)} of this rank at most{limit}")
        return [*found, "", self._moments()] if self.over_time else found

    def _moments(self) -> str:
        names = [rung.name for rung in self.rungs if any(rung.name in sizes for _, sizes, _ in self.over_time)]
        rows = [
            (moment, *(format_bytes(sizes.get(name, 0.0)) for name in names),
             *([format_bytes(on_host)] if self.host_peak_bytes else []))
            for moment, sizes, on_host in self.over_time[:: max(1, -(-len(self.over_time) // MOST_MOMENTS))]
        ]  # fmt: skip
        titles = [_on_device(name) for name in names] + ["in the host's memory"] * bool(self.host_peak_bytes)
        return align(("moment", *titles), rows)

    def document(self) -> dict[str, object]:
        """The ladder as JSON values, in bytes and seconds."""
        return {
            "rungs": [asdict(rung) for rung in self.rungs],
            "over_time": [
                {"moment": moment, "device_bytes": dict(sizes), "host_bytes": on_host}
                for moment, sizes, on_host in self.over_time
            ],
            "host_peak_bytes": self.host_peak_bytes,
            "host_limit_bytes": self.host_limit_bytes,
        }


def _on_device(rung: str) -> str:
    """What of a rung is on the device for a while."""
    return rung if "host" not in rung else rung.replace("on the host", "back from the host")
