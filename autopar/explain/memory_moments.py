"""Memory: where the bytes of the fullest moment of a step are, by kind, by module and over time.

    parameters                      1.2 GiB     stored blocks
    optimizer state                 2.4 GiB     with the totals of gradients where a step has micro-batches
    gradients                       0.6 GiB     finished ones
    activations saved for backward  8.1 GiB     made in forward, read in backward
    gathered parameters             0.4 GiB     whole, while they are read
    moved by collectives            0.2 GiB     copies in other layouts, buckets
    working values                  1.1 GiB     everything else that lives just then

    stage    ranks    states     in flight                  peak
    0        0 .. 3   1.2 GiB    4 x 0.8 GiB                4.9 GiB        1F1B: 4 micro-batches wait for their backward
    1        4 .. 7   1.2 GiB    3 x 0.8 GiB                4.1 GiB

A rank takes its passes one after the other, so what it holds follows from their order alone: states; what every
forward left for its backward; what the first half of a backward left for the second; and inside of a pass the live
ranges of its graph (`graphs/live_ranges.py`). No stages is one stage: nothing waits beside the pass that runs, and a
moment is told by its operator alone. It is what the simulator counts (`step_program.py`), buffer by buffer.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost_models.program_timeline import PassBytes
from autopar.explain.answers import MemoryTable, StageMemory
from autopar.explain.asked_step import AskedStep, asked_step
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
    loss_operators,
    module_of,
    moment_of,
    owner_of,
    pieces_at,
    sums,
)
from autopar.explain.source import Source
from autopar.graphs.live_ranges import bytes_over_time
from autopar.graphs.node_values import node_bytes
from autopar.plans.parallel_plan import Plan
from autopar.schedules.actions import PipeAction
from autopar.simulation.priced_stages import PricedStage, StepGraphs

AT_OPTIMIZER = "the optimizer's step"
UNREDUCED = "gradients before they are scattered"
KEPT = "kept for the gradients of weights"
Piece = tuple[str, str, float]
"""(name, kind, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """The fullest node of one pass, or (action None) the optimizer's step. in_flight, kept: of every stage, the
    micro-batches that wait for their backward, and for their W; bytes: without states."""

    action: PipeAction | None
    index: int
    bytes: float
    in_flight: dict[int, int]
    kept: dict[int, int]


def memory_table(source: Source, plan: Plan, rank: int | None) -> MemoryTable:
    """The table of one rank, or (None) of the first rank of the tightest group, and what every stage keeps.

    Raises ConfigurationError for a rank that the plan does not have.
    """
    asked = asked_step(source, plan)
    graphs = asked.graphs(rank or 0)
    held = [_Held(asked, graphs, group) for group in range(len(plan.rank_groups))]
    group = max(range(len(held)), key=lambda one: held[one].peak) if rank is None else plan.group_of(rank)
    own = held[group]
    pieces = list(own.pieces(own.fullest))
    return MemoryTable(
        rank=plan.rank_groups[group].first_rank if rank is None else rank,
        moment=own.name(own.fullest),
        peak_bytes=math.fsum(size for _, _, size in pieces),
        limit_bytes=asked.limit_bytes(group),
        by_kind=sums((kind, size) for _, kind, size in pieces),
        by_module=sums((module_of(name, own.loss), size) for name, _, size in pieces),
        over_time=tuple(own.over_time()),
        stages=() if own.is_only_stage else tuple(stage for one in held for stage in one.stages()),
    )


class _Held:
    """What one rank of a group holds over a step."""

    def __init__(self, asked: AskedStep, graphs: StepGraphs, group: int) -> None:
        self.plan, self.graphs, self.group = asked.plan, graphs, group
        self.state_bytes = asked.step.state_bytes
        self.own = [graphs.of[stage] for stage in graphs.held_by(group)]
        self.is_only_stage = not asked.plan.in_stages
        self.loss = loss_operators(_nodes(self.own[0])) if self.is_only_stage else frozenset[str]()
        self.states = list(self._states())
        self.constant = math.fsum(size for _, _, size in self.states)
        self.update = asked.step.update_bytes([stage.lowered.program for stage in self.own], self.own[0].cluster.device)
        self.moments = list(self._moments())
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

    def name(self, moment: _Moment) -> str:
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

    def _moments(self) -> Iterator[_Moment]:
        """The fullest moment of every pass, in the order of the schedule, then the optimizer's step."""
        actions = self.graphs.schedule.ranks[self.group]
        in_flight = Counter(action.stage for action in actions if action.micro_batch < 0)
        kept = Counter[int]()
        for action in actions:
            stage = action.stage
            if action.kind in ("B", "I"):
                in_flight[stage] -= 1
            if action.kind == "W":
                kept[stage] -= 1
            index, inside = self._inside(action)
            waiting = sum(count * self.graphs.of[s].bytes_of_passes[0].after for s, count in in_flight.items())
            waiting += sum(count * self.kept_bytes(self.graphs.of[s]) for s, count in kept.items())
            yield _Moment(
                action=action, index=index, bytes=waiting + inside, in_flight=dict(in_flight), kept=dict(kept)
            )
            if action.kind == "F":
                in_flight[stage] += int(self.graphs.of[stage].lowered.partition.backward is not None)
            if action.kind == "I":
                kept[stage] += 1
        if self.own[0].lowered.program.training or self.is_only_stage:
            live = bytes_over_time(self.own[0].live_ranges).tolist() if self.is_only_stage else []
            left = self.update + sum(live[-1:])
            yield _Moment(action=None, index=len(live) - 1, bytes=left, in_flight={}, kept={})

    def _inside(self, action: PipeAction) -> tuple[int, float]:
        """(node, bytes) of the fullest moment of a pass, of this pass alone."""
        stage = self.graphs.of[action.stage]
        forward, backward = stage.bytes_of_passes
        if action.kind == "W":
            return stage.turn, self.kept_bytes(stage)
        live = forward.live if action.kind == "F" else backward.live
        if not live:
            return 0, 0.0
        fullest = max(range(len(live)), key=live.__getitem__)
        return (fullest if action.kind == "F" else stage.turn + fullest), _peak(forward, backward, action.kind)

    def kept_bytes(self, stage: PricedStage) -> float:
        """What a stage keeps between I and W, as the simulator counts it."""
        return min(stage.kept_bytes, max(stage.bytes_of_passes[1].live, default=0.0))

    # of which kind, and whose

    def pieces(self, moment: _Moment) -> Iterator[Piece]:
        yield from self.states
        for number, count in moment.in_flight.items():
            yield from _scaled(self._waiting(self.graphs.of[number]), count)
        for number, count in moment.kept.items():
            yield from _scaled(self._kept(self.graphs.of[number]), count)
        if moment.action is None:
            yield "", UPDATE, self.update
            if self.is_only_stage:
                yield from _living(self.own[0], moment.index)
        elif moment.action.kind == "W":
            yield from self._kept(self.graphs.of[moment.action.stage])
        else:
            stage = self.graphs.of[moment.action.stage]
            inside = self._inside(moment.action)[1]
            yield from _with_rest(list(_living(stage, moment.index)), inside)

    def _waiting(self, stage: PricedStage) -> list[Piece]:
        """What one micro-batch leaves between forward and backward."""
        found = [
            (name, SAVED, size)
            for name, _, size in pieces_at(
                stage.lowered.program,
                stage.lowered.partition,
                [live for live in stage.live_ranges if live.first_index < stage.turn <= live.last_index],
                stage.turn,
            )
        ]
        return _with_rest(found, stage.bytes_of_passes[0].after)

    def _kept(self, stage: PricedStage) -> list[Piece]:
        found = [(owner_of(node), KEPT, float(node_bytes(node))) for node in stage.kept_for_weights]
        return _with_rest(found, self.kept_bytes(stage))


def _nodes(stage: PricedStage) -> list[fx.Node]:
    """Forward, then backward; live ranges count them."""
    return [node for graph in stage.lowered.partition.graphs for node in graph.graph.nodes if node.op != "output"]


def _living(stage: PricedStage, index: int) -> Iterator[Piece]:
    return pieces_at(stage.lowered.program, stage.lowered.partition, stage.live_ranges, index)


def _peak(forward: PassBytes, backward: PassBytes, kind: str) -> float:
    return max(*forward.live, forward.after) if kind == "F" else max(*backward.live, backward.before)


def _scaled(pieces: Sequence[Piece], count: int) -> Iterator[Piece]:
    return ((name, kind, count * size) for name, kind, size in pieces if count)


def _with_rest(pieces: list[Piece], total: float) -> list[Piece]:
    """The pieces, and what a pass holds beyond them."""
    rest = total - math.fsum(size for _, _, size in pieces)
    return [*pieces, ("", WORKING, rest)] if rest >= 1.0 else pieces
