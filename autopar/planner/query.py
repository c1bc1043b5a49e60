"""Query: everything that a plan answers besides the mesh, and how its arguments are read.

Query(program=..., cluster=..., budget_bytes=budget("0.9", cluster), search=SEARCH["default"], ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster
from autopar.cost_models.memory import usable_bytes
from autopar.errors import ConfigurationError
from autopar.layouts.placement import Mesh
from autopar.parallel_plan import Plan
from autopar.planner.constraints import BATCH_AXES, Constraints, Recompute
from autopar.planner.factorisation import Factorisation
from autopar.planner.kept import Kept
from autopar.planner.leaves import StateBytes
from autopar.planner.search import SEARCH, Search
from autopar.planner.solver.deadline import Deadline
from autopar.planner.targets import Wish, freed_axes
from autopar.program import MicroProgram, Program

Progress = Callable[[str], None]
NO_DEADLINE = Deadline(at=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Everything that a plan answers, besides the mesh."""

    program: Program
    cluster: Cluster
    state_bytes: Mapping[str, StateBytes]
    constraints: Constraints
    budget_bytes: float
    kernel_backend: str
    factorisation: Factorisation
    search: Search
    wishes: tuple[Wish, ...] = ()
    recompute: Recompute | None = None
    micro: MicroProgram | None = None
    hidden_share: float = 0.0
    """Part of the seconds of all communication of parameters that the objective leaves out (`hidden.py`)."""
    deadline: Deadline = NO_DEADLINE
    warm_start: Plan | None = None
    kept: Kept = field(default_factory=Kept, compare=False)

    def seconds_left(self) -> float | None:
        """What is left of the user's own time limit, in seconds by the clock; None without one."""
        left = self.deadline.left()
        return None if math.isinf(left) else left

    def priced(self, mesh: Mesh) -> tuple[object, ...]:
        """What the priced problem on a mesh depends on, before the user's own constraints take choices away. They count
        only where they free an axis of what its name asks."""
        names_ask = {axis for axis, name in enumerate(mesh.axis_names) if name in (*BATCH_AXES, "tp")}
        names_ask |= set(range(len(mesh.shape))) if self.constraints.no_replicated_compute else set()
        freed = {node: names_ask & set(axes) for node, axes in freed_axes(self.wishes, mesh).items()}
        question = replace(
            self,
            constraints=replace(self.constraints, placements={}, recompute={}),
            wishes=(),
            budget_bytes=0.0,
            search=SEARCH["default"],
            deadline=NO_DEADLINE,
            warm_start=None,
            recompute=None,
            kept=Kept(),
        )
        return mesh, question, {node: axes for node, axes in freed.items() if axes}


def kernel_backend(cluster: Cluster) -> str:
    """Who emits kernels: PyTorch eager on CPUs, inductor on CUDA."""
    return "eager" if cluster.device.kind == "cpu" else "inductor"


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
