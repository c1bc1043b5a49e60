"""Memory over time: what a rank of every rank group holds during a played step, by kind.

    0.0 ms     parameters 5.4, optimizer state 10.8, activations saved for backward 0.0, ... GiB
    1.8 ms     the fullest node of the next part of the pass that runs ...

Moments are those of `held_memory.py`, several of them for every pass; the played step says when each begins. Their
largest sum is the peak of `Plan.memory()`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.simulator import COMPUTE_STREAM, Timeline
from autopar.explain.held_memory import HeldMemory, Moment
from autopar.explain.memory_pieces import sums
from autopar.plans.rung_names import ON_HOST, STATES_ON_HOST
from autopar.schedules.actions import Kind, PipeAction
from autopar.simulation.bodies import Body
from autopar.simulation.step_program import StepProgram

MOST_MOMENTS = 240
"""Of one rank: about as many as a picture of it shows."""
NO_KERNELS = frozenset({"states", "waits", "nothing"})
"""Actions on the stream of kernels that the player adds."""
PASS = re.compile(r"\d+[FBIW]\d+(?= |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverTime:
    """What the first rank of a rank group holds on its device, or on the host (on_host). moments: (second at which it
    begins, kind -> bytes at its fullest node), in order; seconds: of the step."""

    group: int
    rank: int
    seconds: float
    moments: tuple[tuple[float, Mapping[str, float]], ...]
    on_host: bool = False

    @property
    def kinds(self) -> list[str]:
        """What lives throughout first, largest first; then what comes and goes."""
        every = dict.fromkeys(kind for _, by_kind in self.moments for kind in by_kind)
        least = {kind: min(by_kind.get(kind, 0.0) for _, by_kind in self.moments) for kind in every}
        most = {kind: max(by_kind.get(kind, 0.0) for _, by_kind in self.moments) for kind in every}
        return sorted(every, key=lambda kind: (-least[kind], -most[kind]))

    @property
    def peak(self) -> tuple[float, Mapping[str, float]]:
        """The fullest moment."""
        return max(self.moments, key=lambda moment: _total(moment[1]))

    @property
    def peak_bytes(self) -> float:
        """Of all kinds at the fullest moment."""
        return _total(self.peak[1])


def _total(by_kind: Mapping[str, float]) -> float:
    return math.fsum(by_kind.values())


def memory_over_time(step: StepProgram, timeline: Timeline) -> list[MemoryOverTime]:
    """Of the first rank of every rank group; behind these, of what one has on the host. timeline: the step, played."""
    found = [_of_group(step, timeline, group) for group in range(len(step.plan.rank_groups))]
    return [*(here for here, _ in found), *(there for _, there in found if there.peak_bytes)]


def _of_group(step: StepProgram, timeline: Timeline, group: int) -> tuple[MemoryOverTime, MemoryOverTime]:
    """(on its device, on the host)."""
    held = HeldMemory(step, step.graphs, group)
    parts = max(1, MOST_MOMENTS // max(1, len(held.moments)))
    starts = _Starts(step, timeline, group)
    moments = [(starts.of(moment), moment) for moment in held.moments_in(parts)]
    here = tuple((at, sums((kind, size) for _, kind, size in held.pieces(moment))) for at, moment in moments)
    there = tuple((at, _on_host(held, moment)) for at, moment in moments)
    rank, seconds = step.plan.rank_groups[group].first_rank, timeline.makespan_seconds
    return (
        MemoryOverTime(group=group, rank=rank, seconds=seconds, moments=here),
        MemoryOverTime(group=group, rank=rank, seconds=seconds, moments=there, on_host=True),
    )


def _on_host(held: HeldMemory, moment: Moment) -> dict[str, float]:
    """What a rank has on the host, by rung."""
    return sums([(STATES_ON_HOST, held.states_on_host), (ON_HOST, held.left_on_host(moment.index))])


class _Starts:
    """When the parts of the passes of one rank group begin."""

    def __init__(self, step: StepProgram, timeline: Timeline, group: int) -> None:
        self.step, self.group = step, group
        self._positions: dict[tuple[int, Kind], list[int]] = {}
        self._of_ends: dict[PipeAction, list[int]] = {}
        self._last = 0.0
        self.kernels = self._kernels(timeline, group)
        self.optimizer = max(
            (at for action, at in zip(timeline.actions, timeline.start_seconds, strict=True)
             if action.rank == group and action.name == "optimizer"), default=timeline.makespan_seconds,
        )  # fmt: skip

    def of(self, moment: Moment) -> float:
        """The start of the first kernel of a part (of the part before, where a pass has none), or of the optimizer."""
        if moment.action is None:
            return self.optimizer
        times = self.kernels[str(moment.action)]
        first = moment.first - self.step.graphs.of[moment.action.stage].first_node(moment.action.kind)
        behind = sum(position < first for position in self._kernel_positions(moment.action))
        self._last = times[min(behind, len(times) - 1)] if times else self._last
        return self._last

    def _kernel_positions(self, action: PipeAction) -> list[int]:
        """Where the kernels of a pass stand in its graph."""
        key = (action.stage, action.kind)
        if key not in self._positions:
            kinds, stage = self.step.graphs.passes.kinds(action.stage), self.step.graphs.of[action.stage]
            for body in self.step.bodies(stage, kinds):
                if body.turn in ("F", "B", "I", "W"):
                    self._positions[action.stage, body.turn] = _kernel_positions(body)
            if self.step.plan.in_stages:
                last = self.step.last_passes(self.group)
                self._of_ends |= {end: _kernel_positions(body) for end, body in last.items()}
            else:
                self._of_ends |= {end: _kernel_positions(body) for end, body in self.step.ends(stage).items()}
        return self._of_ends.get(action) or self._positions[key]

    def _kernels(self, timeline: Timeline, group: int) -> dict[str, list[float]]:
        """Pass -> starts of its kernels. Passes of a pipeline stand in the names; else they follow each other."""
        played = [
            (action.name, start)
            for action, start in zip(timeline.actions, timeline.start_seconds, strict=True)
            if action.rank == group and action.stream == COMPUTE_STREAM and not _is_added(action.name)
        ]
        passes = self.step.graphs.passes.ranks[group]
        found: dict[str, list[float]] = {str(action): [] for action in passes}
        if self.step.plan.in_stages:
            for name, start in played:
                label = PASS.match(name)
                if label is not None:
                    found[label.group()].append(start)
            return found
        rest = iter([start for _, start in played])
        for action in passes:
            found[str(action)] = [start for _, start in zip(self._kernel_positions(action), rest, strict=False)]
        return found


def _kernel_positions(body: Body) -> list[int]:
    return [one.position for one in body.actions if one.stream == COMPUTE_STREAM]


def _is_added(name: str) -> bool:
    return name in NO_KERNELS or name.endswith(", host") or name.rpartition(" ")[2] in NO_KERNELS
