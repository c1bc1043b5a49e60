"""Shortage: when nothing fits, what is short and which change would fit, found by solving again.

no plan fits 1.0 GiB per device on 8 devices: the smallest needs 3.2 GiB on mesh (8,); largest parts:
transformer.h.*.mlp.c_fc.weight (parameter and its state) 0.8 GiB, ... It fits with 32 devices (0.9 GiB, ...)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.problem.build import Built
from autopar.planner.solver import MemoryRow
from autopar.plans.plan_text import format_bytes, format_seconds
from autopar.plans.plan_value import Prediction
from autopar.plans.rung_names import host_bytes

Labels = NDArray[np.int64]

LARGEST_PARTS = 3
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """What the user would change, and what the plan then needs."""

    description: str
    predicted: Prediction
    host_room: float = 0.0
    """Bytes that a device may have on its host."""

    def __str__(self) -> str:
        figures = [format_bytes(self.predicted.peak_bytes)]
        if there := host_bytes(self.predicted):
            figures.append(f"{format_bytes(there)} of the {format_bytes(self.host_room)} that a device has on its host")
        figures.append(f"predicted step {format_seconds(self.predicted.step_seconds)}")
        return f"{self.description} ({', '.join(figures)})"


class SearchEnded(InfeasibleError):
    """The time of a search on one mesh was over before it found a plan that fits: there may be one."""

    def __init__(self, mesh: Mesh, seconds: float, budget_bytes: float) -> None:
        super().__init__(
            f"found no plan that obeys the constraints within {format_bytes(budget_bytes)} on mesh {mesh.shape} in "
            f'{seconds:.3g} s; search longer with mode="max", or loosen the constraints'
        )
        self.mesh = mesh


class Slower(InfeasibleError):
    """A mesh was not fitted into memory, or not solved to its end, as its bound is above the seconds of another
    answer."""

    def __init__(self, mesh: Mesh, seconds: float, other_seconds: float, how: str) -> None:
        super().__init__(
            f"mesh {mesh.shape} takes at least {format_seconds(seconds)} {how}, and another answer "
            f"{format_seconds(other_seconds)}"
        )


class DoesNotFit(InfeasibleError):
    """Nothing fits on one mesh. needed_bytes: the least that was found per device; parts: where they go; beside: what
    else is short, where that fits; by_way: way of recomputing or of using the host -> the least that it needs."""

    def __init__(
        self,
        mesh: Mesh,
        needed_bytes: float,
        budget_bytes: float,
        parts: Mapping[str, float],
        beside: str = "",
        by_way: Mapping[str, float] | None = None,
    ) -> None:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        ways = ", ".join(f"{way} {format_bytes(size)}" for way, size in (by_way or {}).items())
        super().__init__(
            f"no plan fits {format_bytes(budget_bytes)} per device on {mesh.size} devices: the smallest needs "
            f"{format_bytes(needed_bytes)} on mesh {mesh.shape}; largest parts: {listed}"
            f"{'; the least, ' * bool(ways)}{ways}{'; ' * bool(beside)}{beside}"
        )
        self.mesh, self.needed_bytes, self.budget_bytes = mesh, needed_bytes, budget_bytes
        self.parts, self.beside = parts, beside

    def with_ways(self, by_way: Mapping[str, float]) -> DoesNotFit:
        """The same with the least bytes by way."""
        return DoesNotFit(self.mesh, self.needed_bytes, self.budget_bytes, self.parts, self.beside, by_way)


def fullest_parts(built: Built, rows: Sequence[MemoryRow], labels: Labels) -> tuple[float, dict[str, float]]:
    """(bytes at the fuller moment under an assignment, its largest parts); layers that repeat are one part."""
    moments = [{index: float(sizes[labels[index]]) for index, sizes in row.bytes.items()} for row in rows]
    fullest = max(moments, key=lambda entries: sum(entries.values()))
    parts: dict[str, float] = {}
    for index, size in fullest.items():
        variable = built.variables[index]
        kind = "parameter and its state" if variable.kind == "parameter" else "saved for backward"
        name = f"{_LAYER_NUMBER.sub('*', variable.name)} ({kind})"
        parts[name] = parts.get(name, 0.0) + size
    largest = sorted(parts.items(), key=lambda item: -item[1])[:LARGEST_PARTS]
    return sum(fullest.values()), dict(largest)


def with_suggestions(
    failure: InfeasibleError,
    suggestions: Sequence[Suggestion],
    short: Sequence[str],
    untried: Sequence[str],
    searched: str,
) -> InfeasibleError:
    """The same error with what would fit (memory, predicted step), what would not, and what the search had tried."""
    fits = [str(suggestion) for suggestion in suggestions]
    text = f"It fits with {', or with '.join(fits)}. " if fits else ""
    alone = "" if fits else ", alone or two of them together"
    text += f"Not enough{alone}: {', '.join(short)}. " if short else ""
    text += f"Not tried, for lack of time: {', '.join(untried)}. " if untried else ""
    return InfeasibleError(f"{failure}. {text}{searched}A smaller batch or a higher memory_limit may fit too")


def with_more_devices(cluster: Cluster, factor: int) -> Cluster:
    """The same nodes, `factor` times as many; devices of a single CPU machine are more processes."""
    if cluster.device.kind == "cpu":
        return replace(cluster, devices_per_node=cluster.devices_per_node * factor)
    return replace(cluster, num_nodes=cluster.num_nodes * factor)
