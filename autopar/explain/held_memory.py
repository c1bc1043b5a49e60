"""Held memory: what one rank holds over a step, buffer by buffer, as a run of moments.

    parameters, optimizer state             throughout
    activations saved for backward          of every micro-batch between its forward and its backward
    everything else                         inside of the pass that runs, by the live ranges of its graph

A rank takes its passes one after the other, so what it holds follows from their order alone. No stages is one stage:
nothing waits beside the pass that runs, and a moment is told by its operator alone. It is what the simulator counts
(`step_program.py`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.cost_models.program_timeline import PassBytes
from autopar.explain.answers import StageMemory
from autopar.explain.memory_pieces import (
    GATHERED,
    GRADIENTS,
    JOINED,
    LOSS,
    OPTIMIZER,
    OUTSIDE,
    PARAMETERS,
    SAVED,
    UPDATE,
    WORKING,
    TaggedRange,
    loss_operators,
    moment_of,
    owner_of,
    tagged,
)
from autopar.graphs.live_ranges import bytes_over_time
from autopar.graphs.node_values import node_bytes
from autopar.schedules.actions import PipeAction
from autopar.simulation.priced_stages import PricedStage, StepGraphs
from autopar.simulation.step_program import StepProgram

AT_OPTIMIZER = "the optimizer's step"
UNREDUCED = "gradients before they are scattered"
KEPT = "kept for the gradients of weights"
Piece = tuple[str, str, float]
"""(name, kind, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The fullest node (index) of a part of one pass, whose first node is `first`, or (action None) the optimizer's
    step. in_flight, kept: of every stage, the micro-batches that wait for their backward, and for their W; bytes:
    without states; inside: of these, those of the pass alone."""

    action: PipeAction | None
    index: int
    bytes: float
    first: int = 0
    inside: float = 0.0
    in_flight: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)


class HeldMemory:
    """What one rank of a group holds over a step."""

    def __init__(self, step: StepProgram, graphs: StepGraphs, group: int) -> None:
        self.plan, self.graphs, self.group = step.plan, graphs, group
        self.state_bytes = step.state_bytes
        self._tagged: dict[int, list[TaggedRange]] = {}
        self.own = [graphs.of[stage] for stage in graphs.held_by(group)]
        self.is_only_stage = not step.plan.in_stages
        self.loss = loss_operators(_nodes(self.own[0])) if self.is_only_stage else frozenset[str]()
        self.states = list(self._states())
        self.constant = math.fsum(size for _, _, size in self.states)
        self.update = step.update_bytes([stage.lowered.program for stage in self.own], self.own[0].cluster.device)
        self.moments = list(self.moments_in(1))
        self.fullest = max(self.moments, key=lambda moment: (moment.bytes, moment.action is None))
        self.peak = self.constant + self.fullest.bytes

    def stages(self) -> Iterator[StageMemory]:
        """What every stage of this group holds, with the most micro-batches that it has between F and B at once."""
        ranks = self.plan.rank_groups[self.group]
        for stage in self.own:
            saved = stage.bytes_of_passes[0].after
            yield StageMemory(
                stage=stage.number,
                name=self.plan.stages[stage.number].name,
                ranks=(ranks.first_rank, ranks.first_rank + ranks.size - 1),
                state_bytes=math.fsum(size for _, _, size in self._states_of(stage)),
                in_flight=self._most_in_flight(stage.number),
                bytes_per_micro_batch=saved,
                peak_bytes=self.peak,
            )

    def _most_in_flight(self, stage: int) -> int:
        """Those that wait, and the one whose forward or backward runs."""
        return max(
            moment.in_flight.get(stage, 0) + (moment.action.stage == stage and moment.action.kind != "W")
            for moment in self.moments
            if moment.action is not None
        )

    def name(self, moment: Moment) -> str:
        if moment.action is None:
            return AT_OPTIMIZER
        stage = self.graphs.of[moment.action.stage]
        said, nodes = [] if self.is_only_stage else [str(moment.action)], _nodes(stage)
        return ", ".join([*said, *([moment_of(nodes, moment.index, self.loss)] if nodes else [])])

    def over_time(self) -> Iterator[tuple[str, float]]:
        """The fullest moment of every pass, or of the only stage of every block, in the order in which they run."""
        if self.is_only_stage:
            yield from self._blocks(self.own[0])
        for moment in self.moments:
            if moment.action is None or not self.is_only_stage:
                yield str(moment.action or AT_OPTIMIZER), self.constant + moment.bytes

    def _blocks(self, stage: PricedStage) -> Iterator[tuple[str, float]]:
        """The fullest operator of every block, of the first micro-batch."""
        named = [
            (str(node.meta["phase"]), self._block(owner_of(node)), self.constant + float(size))
            for node, size in zip(_nodes(stage), bytes_over_time(stage.live_ranges).tolist(), strict=False)
            if node.op == "call_function" and owner_of(node) in self.plan.operators and "redistributes" not in node.meta
        ]
        for (phase, block), run in itertools.groupby(named, key=lambda entry: entry[:2]):
            yield f"{phase} {block}", max(size for _, _, size in run)

    def _block(self, operator: str) -> str:
        """The module of an operator up to its first number: "model.layers.3"; else up to the second name."""
        if operator in self.loss:
            return LOSS
        path = operator.partition("/")[0].split(".")
        end = next((index + 1 for index, part in enumerate(path) if part.isdigit()), 2)
        return ".".join(path[:end]) or OUTSIDE

    # what lives throughout

    def _states(self) -> Iterator[Piece]:
        """Of all stages of the rank; a parameter that several of them read is there once."""
        seen = set[str]()
        for stage in self.own:
            pieces = list(self._states_of(stage))
            yield from (one for one in pieces if one[1] not in (PARAMETERS, OPTIMIZER, GRADIENTS) or one[0] not in seen)
            seen |= {name for name, kind, _ in pieces if kind == PARAMETERS}

    def _states_of(self, stage: PricedStage) -> Iterator[Piece]:
        totals = OPTIMIZER if self.is_only_stage else GRADIENTS
        stored = 0.0
        for entry in stage.lowered.program.inputs:
            if entry.role == "parameter":
                elements, state = math.prod(entry.shape), self.state_bytes[entry.name]
                total = float(elements * state.gradient) * stage.lowered.context.kept_totals
                stored += total
                yield entry.name, PARAMETERS, float(elements * entry.dtype.itemsize)
                yield entry.name, OPTIMIZER, float(elements * state.optimizer)
                yield entry.name, totals, total
        if stage.joined_bytes:
            yield "", JOINED, stage.joined_bytes
        if stage.lowered.prepared is not None:
            yield from ((name, GATHERED, size) for name, size in stage.gathered_bytes.items())
            yield "", UNREDUCED, max(0.0, math.fsum(stage.total_bytes.values()) - stored)

    # what comes and goes

    def moments_in(self, parts: int) -> Iterator[Moment]:
        """The fullest moment of every part of every pass, in the order of the schedule, then the optimizer's step."""
        actions = self.graphs.schedule.ranks[self.group]
        in_flight = Counter(action.stage for action in actions if action.micro_batch < 0)
        kept = Counter[int]()
        for action in actions:
            stage = action.stage
            if action.kind in ("B", "I"):
                in_flight[stage] -= 1
            if action.kind == "W":
                kept[stage] -= 1
            waiting = sum(count * self.graphs.of[s].bytes_of_passes[0].after for s, count in in_flight.items())
            waiting += sum(count * self.kept_bytes(self.graphs.of[s]) for s, count in kept.items())
            for first, index, inside in self._inside(action, parts):
                yield Moment(
                    action=action, first=first, index=index, inside=inside, bytes=waiting + inside,
                    in_flight=dict(in_flight), kept=dict(kept),
                )  # fmt: skip
            if action.kind == "F":
                in_flight[stage] += int(self.graphs.of[stage].lowered.partition.backward is not None)
            if action.kind == "I":
                kept[stage] += 1
        if self.own[0].lowered.program.training or self.is_only_stage:
            live = bytes_over_time(self.own[0].live_ranges).tolist() if self.is_only_stage else []
            left = self.update + sum(live[-1:])
            yield Moment(action=None, index=len(live) - 1, bytes=left)

    def _inside(self, action: PipeAction, parts: int) -> Iterator[tuple[int, int, float]]:
        """(first node, fullest node, bytes of the pass alone) of every part of a pass. Halves of a backward are one."""
        stage = self.graphs.of[action.stage]
        forward, backward = stage.bytes_of_passes
        live = forward.live if action.kind == "F" else backward.live
        shift = 0 if action.kind == "F" else stage.turn
        if action.kind == "W" or not live:
            yield shift, shift, self.kept_bytes(stage) if action.kind == "W" else 0.0
            return
        peak, whole = _peak(forward, backward, action.kind), max(live)
        length = math.ceil(len(live) / (1 if action.kind == "I" else parts))
        for first in range(0, len(live), length):
            fullest = max(range(first, min(first + length, len(live))), key=live.__getitem__)
            yield shift + first, shift + fullest, peak if live[fullest] == whole else live[fullest]

    def kept_bytes(self, stage: PricedStage) -> float:
        """What a stage keeps between I and W, as the simulator counts it."""
        return min(stage.kept_bytes, max(stage.bytes_of_passes[1].live, default=0.0))

    # of which kind, and whose

    def pieces(self, moment: Moment) -> Iterator[Piece]:
        yield from self.states
        for number, count in moment.in_flight.items():
            yield from _scaled(self._waiting(self.graphs.of[number]), count)
        for number, count in moment.kept.items():
            yield from _scaled(self._kept(self.graphs.of[number]), count)
        if moment.action is None:
            yield "", UPDATE, self.update
            if self.is_only_stage:
                yield from self._living(self.own[0], moment.index)
        elif moment.action.kind == "W":
            yield from self._kept(self.graphs.of[moment.action.stage])
        else:
            stage = self.graphs.of[moment.action.stage]
            yield from _with_rest(list(self._living(stage, moment.index)), moment.inside)

    def _ranges(self, stage: PricedStage) -> list[TaggedRange]:
        if stage.number not in self._tagged:
            self._tagged[stage.number] = tagged(stage.lowered.program, stage.lowered.partition, stage.live_ranges)
        return self._tagged[stage.number]

    def _living(self, stage: PricedStage, index: int) -> Iterator[Piece]:
        """What lives at a node of forward and backward."""
        for live, name, kind in self._ranges(stage):
            if live.first_index <= index <= live.last_index:
                yield name, kind, float(live.bytes)

    def _waiting(self, stage: PricedStage) -> list[Piece]:
        """What one micro-batch leaves between forward and backward."""
        found = [
            (name, SAVED, float(live.bytes))
            for live, name, _ in self._ranges(stage)
            if live.first_index < stage.turn <= live.last_index
        ]
        return _with_rest(found, stage.bytes_of_passes[0].after)

    def _kept(self, stage: PricedStage) -> list[Piece]:
        """Views among them share their bytes, so each has its part of what the simulator counts."""
        total = self.kept_bytes(stage)
        part = min(1.0, total / stage.kept_bytes) if stage.kept_bytes else 1.0
        found = [(owner_of(node), KEPT, part * node_bytes(node)) for node in stage.kept_for_weights]
        return _with_rest(found, total)


def _nodes(stage: PricedStage) -> list[fx.Node]:
    """Forward, then backward; live ranges count them."""
    return [node for graph in stage.lowered.partition.graphs for node in graph.graph.nodes if node.op != "output"]


def _peak(forward: PassBytes, backward: PassBytes, kind: str) -> float:
    return max(*forward.live, forward.after) if kind == "F" else max(*backward.live, backward.before)


def _scaled(pieces: Sequence[Piece], count: int) -> Iterator[Piece]:
    return ((name, kind, count * size) for name, kind, size in pieces if count)


def _with_rest(pieces: list[Piece], total: float) -> list[Piece]:
    """The pieces, and what a pass holds beyond them."""
    rest = total - math.fsum(size for _, _, size in pieces)
    return [*pieces, ("", WORKING, rest)] if rest >= 1.0 else pieces
