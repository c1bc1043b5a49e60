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
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

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
from autopar.graphs.live_ranges import LiveRange, bytes_over_time, host_memory_events
from autopar.planner.memory.resident_states import resident_states
from autopar.schedules.actions import Kind, PipeAction
from autopar.simulation.priced_stages import PricedStage, StepGraphs
from autopar.simulation.step_program import StepProgram

AT_OPTIMIZER = "the optimizer's step"
UNREDUCED = "gradients before they are scattered"
KEPT = "kept for the gradients of weights"
MESSAGES = "messages between stages"
Piece = tuple[str, str, float]
"""(name, kind, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The fullest node (index) of a part of one pass, whose first node is `first`, or (action None) the optimizer's
    step. in_flight, kept: of every stage, the micro-batches that wait for their backward, and for their W; bytes:
    without states; inside, messages: of these, those of the pass alone, and of messages on their way."""

    action: PipeAction | None
    index: int
    bytes: float
    first: int = 0
    inside: float = 0.0
    messages: float = 0.0
    in_flight: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)


class HeldMemory:
    """What one rank of a group holds over a step."""

    def __init__(self, step: StepProgram, graphs: StepGraphs, group: int) -> None:
        self.step, self.plan, self.graphs, self.group = step, step.plan, graphs, group
        self.state_bytes = step.state_bytes
        self._tagged: dict[tuple[int, bool], list[TaggedRange]] = {}
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
        nodes = _nodes(self.graphs.of[moment.action.stage], moment.action.kind)
        said = [] if self.is_only_stage else [str(moment.action)]
        return ", ".join([*said, *([moment_of(nodes, moment.index, self.loss)] if nodes else [])])

    def over_time(self) -> Iterator[tuple[str, float]]:
        """The fullest moment of every pass, or of the only stage of every block, in the order in which they run."""
        if self.is_only_stage:
            live = bytes_over_time(self.own[0].live_ranges).tolist()
            for name, index in self._blocks(self.own[0]):
                yield name, self.constant + float(live[index])
        for moment in self._passes():
            yield str(moment.action or AT_OPTIMIZER), self.constant + moment.bytes

    def each_moment(self) -> Iterator[tuple[str, Iterator[Piece], float]]:
        """The moments of `over_time` with the pieces that come and go, and the bytes that forward left on the host."""
        if self.is_only_stage:
            for name, index in self._blocks(self.own[0]):
                yield name, self._living(self.own[0], index), self.left_on_host(index)
        for moment in self._passes():
            yield str(moment.action or AT_OPTIMIZER), self.pieces(moment), 0.0

    @cached_property
    def states_on_host(self) -> float:
        """Bytes of parameters that lie on the host, with gradients and the optimizer's state."""
        device = self.own[0].cluster.device
        return math.fsum(resident_states(one.lowered.program, self.state_bytes, device).host for one in self.own)

    def left_on_host(self, index: int) -> float:
        """Bytes of what forward left on the host, at a node of forward and backward of the only stage."""
        return math.fsum(live.bytes for live in self._left_there if live.first_index <= index <= live.last_index)

    @cached_property
    def _left_there(self) -> list[LiveRange]:
        """Gradients that are sent there are counted with their parameters."""
        if not self.is_only_stage:
            return []
        forward = {node.name for node in _nodes(self.own[0], "B")[: self.own[0].turn]}
        return [live for live in host_memory_events(self.own[0].lowered.partition) if live.name in forward]

    def _passes(self) -> Iterator[Moment]:
        """The moments that are told by themselves: of stages, and the optimizer's step."""
        return (moment for moment in self.moments if moment.action is None or not self.is_only_stage)

    def _blocks(self, stage: PricedStage) -> Iterator[tuple[str, int]]:
        """The fullest operator of every block, of the first micro-batch, by the number of its node."""
        live = bytes_over_time(stage.live_ranges).tolist()
        named = [
            (str(node.meta["phase"]), self._block(owner_of(node)), index)
            for index, node in enumerate(_nodes(stage)[: len(live)])
            if node.op == "call_function" and owner_of(node) in self.plan.operators and "redistributes" not in node.meta
        ]
        for (phase, block), run in itertools.groupby(named, key=lambda entry: entry[:2]):
            yield f"{phase} {block}", max((index for _, _, index in run), key=live.__getitem__)

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
            if entry.role == "parameter" and not entry.on_host:
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
        if stage.lowered.prepared is not None or stage.lowered.last is not None:
            yield "", UNREDUCED, max(0.0, math.fsum(stage.total_bytes.values()) - stored)

    # what comes and goes

    def moments_in(self, parts: int) -> Iterator[Moment]:
        """The fullest moment of every part of every pass, in the order of the schedule, then the optimizer's step."""
        actions = self.graphs.passes.ranks[self.group]
        in_flight = Counter(action.stage for action in actions if action.micro_batch < 0)
        kept = Counter[int]()
        for action, messages in zip(actions, self.graphs.message_bytes(self.group), strict=True):
            stage = action.stage
            if action.kind in ("B", "I"):
                in_flight[stage] -= 1
            if action.kind == "W":
                kept[stage] -= 1
            waiting = sum(count * self.graphs.of[s].bytes_of_passes[0].after for s, count in in_flight.items())
            waiting += sum(count * self.graphs.of[s].held("W").before for s, count in kept.items())
            for first, index, inside in self._inside(action, parts):
                yield Moment(
                    action=action, first=first, index=index, inside=inside, bytes=waiting + inside + messages,
                    in_flight=dict(in_flight), kept=dict(kept), messages=messages,
                )  # fmt: skip
            if action.kind == "F":
                in_flight[stage] += int(self.graphs.of[stage].lowered.partition.backward is not None)
            if action.kind == "I":
                kept[stage] += 1
        if self.own[0].lowered.program.training or self.is_only_stage:
            live = bytes_over_time(self.own[0].live_ranges).tolist() if self.is_only_stage else []
            ends_with_sums = self.is_only_stage and self.own[0].lowered.last is not None
            left = self.own[0].bytes_of_end("B").after if ends_with_sums else sum(live[-1:])
            yield Moment(action=None, index=len(live) - 1, bytes=self.update + left)

    def _inside(self, action: PipeAction, parts: int) -> Iterator[tuple[int, int, float]]:
        """(first node, fullest node, bytes of the pass alone) of every part of a pass."""
        stage = self.graphs.of[action.stage]
        held, shift = stage.held(action.kind), stage.first_node(action.kind)
        live = held.live
        if not live:
            yield shift, shift, held.before
            return
        whole = max(live)
        peak = max(whole, held.after if action.kind == "F" else held.before)
        if self.graphs.last_passes(self.group).get(action.stage) == action:
            peak = max(peak, *stage.bytes_of_end(action.kind).live)
        length = math.ceil(len(live) / parts)
        for first in range(0, len(live), length):
            fullest = max(range(first, min(first + length, len(live))), key=live.__getitem__)
            yield shift + first, shift + fullest, peak if live[fullest] == whole else live[fullest]

    # of which kind, and whose

    def pieces(self, moment: Moment) -> Iterator[Piece]:
        ended = (GATHERED, UNREDUCED) if moment.action is None and self.is_only_stage else ()
        yield from (piece for piece in self.states if piece[1] not in ended)
        if moment.messages:
            yield "", MESSAGES, moment.messages
        for number, count in moment.in_flight.items():
            yield from _scaled(self._waiting(self.graphs.of[number]), count)
        for number, count in moment.kept.items():
            yield from _scaled(self._kept(self.graphs.of[number]), count)
        if moment.action is None:
            yield "", UPDATE, self.update
            if self.is_only_stage:
                yield from self._living(self.own[0], moment.index)
        else:
            action, stage = moment.action, self.graphs.of[moment.action.stage]
            in_halves = action.kind in ("I", "W")
            yield from _with_rest(list(self._living(stage, moment.index, in_halves)), moment.inside)

    def _ranges(self, stage: PricedStage, in_halves: bool = False) -> list[TaggedRange]:
        key = stage.number, in_halves
        if key not in self._tagged:
            lowered, halves = stage.lowered, stage.lowered.halves
            if in_halves and halves is not None:
                parts = replace(lowered.partition, backward=halves.inputs)
                ranges = stage.ranges_of_halves
                self._tagged[key] = tagged(lowered.program, parts, ranges, self.step.rungs, halves.weights)
            else:
                self._tagged[key] = tagged(lowered.program, lowered.partition, stage.live_ranges, self.step.rungs)
        return self._tagged[key]

    def _living(self, stage: PricedStage, index: int, in_halves: bool = False) -> Iterator[Piece]:
        """What lives at a node of forward and backward."""
        for live, name, kind in self._ranges(stage, in_halves):
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
        """What one micro-batch leaves between the halves of backward."""
        border = stage.first_node("W")
        return [
            (name, KEPT, float(live.bytes))
            for live, name, _ in self._ranges(stage, in_halves=True)
            if live.first_index < border <= live.last_index
        ]


def _nodes(stage: PricedStage, kind: Kind = "B") -> list[fx.Node]:
    """Forward, then backward or its halves; live ranges count them."""
    behind: tuple[Kind, ...] = ("I", "W") if kind in ("I", "W") else ("B",)
    return [node for each in ("F", *behind) for node in stage.nodes(each)]


def _scaled(pieces: Sequence[Piece], count: int) -> Iterator[Piece]:
    return ((name, kind, count * size) for name, kind, size in pieces if count)


def _with_rest(pieces: list[Piece], total: float) -> list[Piece]:
    """The pieces, and what a pass holds beyond them."""
    rest = total - math.fsum(size for _, _, size in pieces)
    return [*pieces, ("", WORKING, rest)] if rest >= 1.0 else pieces
