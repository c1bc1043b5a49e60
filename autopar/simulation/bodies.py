"""Bodies: every graph that one stage runs, with the kernels and collectives that it takes, and how often.

F, B, I, W: once per micro-batch, as the schedule says; prepare, late: once per step, where there is any
first: what runs as the first F with prepare in it, where there are no stages
last: what runs as the last B with late in it; in a pipeline, as the last B or W of a stage that sends nothing
ending: what waits for what last or late has started in a pipeline, once per step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import fx

from autopar.cost_models.program_costs import ProgramAction
from autopar.cost_models.program_timeline import wait_positions
from autopar.schedules.actions import Kind
from autopar.simulation.priced_stages import PricedStage

Turn: TypeAlias = Kind | Literal["prepare", "late", "first", "last", "ending"]
"""A pass of the schedule, or what runs once per step in front of all passes, or behind them."""


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """One graph of a stage and what it takes."""

    turn: Turn
    stage: PricedStage
    graph: fx.Graph
    actions: Sequence[ProgramAction]

    @property
    def seconds(self) -> float:
        """Of all its kernels and collectives, one after the other."""
        return math.fsum(action.seconds for action in self.actions)

    @property
    def prices(self) -> dict[int, tuple[float, str]]:
        """Position of a node -> (seconds of the kernel or collective that begins there, its stream); of a product that
        waits for its own collective, both together."""
        found: dict[int, tuple[float, str]] = {}
        for one in self.actions:
            if one.kind != "views":
                before, stream = found.get(one.position, (0.0, one.stream))
                found[one.position] = (before + one.seconds, stream)
        return found

    @property
    def waits(self) -> dict[int, int]:
        """Position of the start of every collective -> that of its first wait."""
        return wait_positions(self.graph.nodes)

    @property
    def inputs(self) -> frozenset[str]:
        """Names of what the program of its stage is given."""
        return frozenset(entry.name for entry in self.stage.lowered.program.inputs)

    @property
    def is_once_per_step(self) -> bool:
        """Whether it runs once per step and not per micro-batch."""
        return self.turn in ("prepare", "late", "ending")
