"""Block costs: a solved problem of the whole program on one sub-mesh -> what every run of it costs.

    solution of GPT-2 on tp=2     labels of all operators, parameters and copies
    block 3                       the seconds of its operators and redistributions, by phase; what it saves; its states

The problem is solved once per sub-mesh, with one micro-batch's program; its solver knows equal blocks, so the work is
that of the distinct ones, and no interval of blocks is ever solved. That restricts what a stage may look like: the
layouts at its borders, and inside of it, are those of the solved plan.

Where seconds belong. An operator: to its segment and phase. A redistribution: to its reader, once per shared copy, as
the simulator plays it. The gather of a parameter: to the forward of its first reader; what its optimizer does, and what
the runtime does once (`step_values`): once per step. What recomputation adds: to backward. An operator of backward that
leads to the gradient of one parameter and to nothing else is W, as the runtime splits backward; the reduction of a
gradient is W too, where it is done for every micro-batch.

Where bytes belong. A value that backward reads: to the segment that reads it, its own or else the first; a stage behind
that reads it too has a copy of its own, and the one in front none where only gradients are read beside it. A parameter
with its state: to every segment that reads it. A value of forward that a later segment reads crosses all borders
between, but for what every stage makes for itself (`passes/stages/place_stages.py`): masks, and casts of parameters
that several stages read. Of such a parameter each stage has a gradient of its own, which they add up once per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.cost_models.stage_costs import host_pass_seconds
from autopar.layouts.placement import Mesh
from autopar.passes.arguments import argument
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.live_bytes import LiveBytes, find_live_bytes
from autopar.planner.memory.recomputation import DROPPED, ON_HOST, RECOMPUTED, SAVED, expand, state_of, with_states
from autopar.planner.one_mesh.host_labels import COPIES_AT_ONCE, HostLabels
from autopar.planner.pipelines.block_table import HOST_MODES, MODES, RECOMPUTE_OF, BlockTable
from autopar.planner.pipelines.gradient_totals import adding_seconds
from autopar.planner.pipelines.runs import Runs
from autopar.planner.pipelines.step_values import StepValues
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.factorisation import Value, shape_of, value_of
from autopar.planner.problem.graph_operators import base_of
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.prices import Floats, Prices, tensor_bytes
from autopar.planner.problem.strategies import local_fraction
from autopar.planner.solver import evaluate, is_forbidden
from autopar.program import Program
from autopar.request.offload import ACTIVATIONS
from autopar.rules.engine import tensor_operands

Labels = NDArray[np.int64]
FORWARD, BACKWARD, WEIGHT = 0, 1, 2
WHOLE = 2
"""Of transients, in the place of W: those of a backward that is not split."""
AGAIN_FIRST, ON_HOST_FIRST = (RECOMPUTED, SAVED, DROPPED), (RECOMPUTED, ON_HOST, SAVED, DROPPED)
"""The states that operators of a stage take, the first that they have: without and with the memory of the host."""
STILL_SECONDS = 1e-7
"""Redistributions below this move nothing: they cost tie-breaks at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A problem on one sub-mesh with the label of every variable, without states of recomputation."""

    built: Built
    labels: Labels
    mesh: Mesh
    prices: Prices
    state_bytes: Mapping[str, StateBytes]
    lifetimes: Lifetimes
    weights: set[fx.Node]
    """Of `weight_operators`."""

    def expanded(self, mode: str) -> tuple[Built, Labels] | None:
        """The problem and labels with recomputation everywhere in one way; None where some value rules that out."""
        if mode == "none":
            return self.built, self.labels
        built = expand(self.built, self.lifetimes, RECOMPUTE_OF[mode])
        if mode in HOST_MODES:
            built = self.with_host(built)
        labels = with_states(self.built, built, self.labels, ON_HOST_FIRST if mode in HOST_MODES else AGAIN_FIRST)
        cost, _ = evaluate(built.problem, labels)
        return None if is_forbidden(np.array(cost)) else (built, labels)

    def with_host(self, built: Built) -> Built:
        """An expanded problem with labels of what waits on the host, at no cost: passes are priced with their copies
        as a whole."""
        labels = HostLabels(
            cluster=self.prices.cluster,
            mesh=self.mesh,
            state_bytes=self.state_bytes,
            lifetimes=self.lifetimes,
            may_wait=(ACTIVATIONS,),
            count=0,
            hidden=False,
        )
        return labels.added(built, {})[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedWay:
    """A solved problem with recomputation in one way, and what its step holds."""

    built: Built
    labels: Labels
    live_bytes: Sequence[LiveBytes]
    moved_bytes: Floats
    """(segments,) that wait on the host."""
    ahead_bytes: float
    """For copies that are under way."""


def ways_of(solved: Solved, modes: Iterable[str] = MODES) -> dict[str, SolvedWay]:
    """The ways of recomputation that no value rules out; all tables of a sub-mesh share them."""
    ways = {}
    for mode in modes:
        expanded = solved.expanded(mode)
        if expanded is not None:
            built, labels = expanded
            live_bytes = find_live_bytes(built, solved.mesh, solved.state_bytes, solved.lifetimes)
            moved = np.zeros(len(solved.lifetimes.segments.names))
            largest = 0.0
            for segment, held in _on_host(solved, built, labels):
                moved[segment] += held
                largest = max(largest, held)
            ways[mode] = SolvedWay(
                built=built,
                labels=labels,
                live_bytes=live_bytes,
                moved_bytes=moved,
                ahead_bytes=COPIES_AT_ONCE * largest,
            )
    return ways


def _on_host(solved: Solved, built: Built, labels: Labels) -> Iterator[tuple[int, float]]:
    """(segment, bytes on one device) of every value that waits on the host."""
    for node, index in built.operators.items():
        variable, label = built.variables[index], int(labels[index])
        if state_of(variable, label) == ON_HOST:
            for output in solved.lifetimes.saved_outputs(node):
                yield solved.lifetimes.segment[node], _local_bytes(variable, label, node, output, solved.mesh)


def _local_bytes(variable: Variable, label: int, node: fx.Node, output: int, mesh: Mesh) -> float:
    layouts = variable.layouts[output]
    if layouts is None:
        return 0.0
    layout = layouts.distinct[layouts.index[label]]
    return local_fraction(layout, shape_of(node, output), mesh) * tensor_bytes(node, output)


def block_table(
    solved: Solved,
    ways: Mapping[str, SolvedWay],
    runs: Runs,
    capacity_bytes: float,
    send_seconds: Callable[[float], float],
    micro_batches: int,
    *,
    gather_once: bool = False,
    copy_rates: tuple[float, float] = (math.inf, math.inf),
    host_capacity_bytes: float = math.inf,
) -> BlockTable:
    """The table of a solved sub-mesh. send_seconds: of so many bytes from every device to its peer in the next stage.

    Outputs of the model live for the whole batch. gather_once: every stage gathers its parameters once per step.
    copy_rates: bytes per second to the host and from there; copies hide behind the pass of their block.
    host_capacity_bytes: what a device may fill of the host's memory.
    """
    seconds = {mode: _Seconds(solved, way.built, way.labels, gather_once) for mode, way in ways.items()}
    bytes_ = {mode: _Bytes(solved, way, micro_batches, gather_once) for mode, way in ways.items()}
    base = next(iter(ways))

    def added(values: Iterable[Floats]) -> Floats:
        return np.stack([np.bincount(runs.of_segment, weights=row, minlength=len(runs.names)) for row in values])

    def largest(values: Iterable[Floats]) -> Floats:
        rows = np.zeros((len(ways), len(runs.names)))
        for row, value in zip(rows, values, strict=True):
            np.maximum.at(row, np.array(runs.of_segment), value)
        return rows

    copies = added(way.moved_bytes for way in ways.values())
    sends = _crossing_bytes(solved, runs)
    parameters = added([_parameter_bytes(solved)])[0]
    return BlockTable(
        name=f"{'x'.join(map(str, solved.mesh.shape))}",
        devices=solved.mesh.size,
        capacity_bytes=capacity_bytes,
        gather_once=gather_once,
        pass_seconds=host_pass_seconds(solved.prices.cluster.device),
        modes=tuple(ways),
        forward_seconds=np.maximum(added(s.of_passes[FORWARD] for s in seconds.values()), copies / copy_rates[0]),
        backward_seconds=np.maximum(added(s.of_passes[BACKWARD] for s in seconds.values()), copies / copy_rates[1]),
        host_bytes=copies,
        host_capacity_bytes=host_capacity_bytes,
        ahead_bytes=max(way.ahead_bytes for way in ways.values()),
        weight_seconds=added(each.of_passes[WEIGHT] for each in seconds.values()),
        saved_bytes=added(each.saved for each in bytes_.values()),
        weight_saved_bytes=added(each.weight_saved for each in bytes_.values()),
        forward_extra_bytes=largest(each.extra[FORWARD] for each in bytes_.values()),
        backward_extra_bytes=largest(each.extra[BACKWARD] for each in bytes_.values()),
        whole_extra_bytes=largest(each.extra[WHOLE] for each in bytes_.values()),
        arrived_bytes=np.stack([each.arrived[_ends_of(runs)] for each in bytes_.values()]),
        handed_bytes=np.stack([each.handed[_ends_of(runs)] for each in bytes_.values()]),
        state_bytes=added([bytes_[base].states])[0],
        update_bytes=added([bytes_[base].updates])[0],
        once_seconds=added([seconds[base].once])[0],
        send_bytes=sends,
        send_seconds=np.array([send_seconds(size) for size in sends], dtype=np.float64),
        parameter_bytes=parameters,
        twin_seconds=np.array([send_seconds(size) for size in parameters], dtype=np.float64),
        shared=tuple((blocks, send_seconds(size)) for blocks, size in _shared_parameters(solved, runs)),
    )


def _ends_of(runs: Runs) -> list[int]:
    """The last segment of every run but the last."""
    return [segment for segment, (run, behind) in enumerate(pairwise(runs.of_segment)) if run != behind]


def weight_operators(program: Program, lifetimes: Lifetimes) -> set[fx.Node]:
    """Operators of backward that lead to the gradient of one parameter and to nothing else."""
    leads: dict[fx.Node, int] = {}
    for number, (node, output) in enumerate(zip(program.returned, program.outputs, strict=True)):
        if output.role == "gradient" and isinstance(node, fx.Node):
            (source, _), _ = base_of(node)
            leads[source] = leads.get(source, 0) | 1 << number
    for node in reversed(lifetimes.in_order):
        for operand in tensor_operands(node):
            (source, _), _ = base_of(operand)
            leads[source] = leads.get(source, 0) | leads.get(node, 0)
    return {n for n in lifetimes.in_order if n.meta["phase"] == "backward" and leads.get(n, 0).bit_count() == 1}


def weight_share(node: fx.Node) -> float:
    """Part of an operator of backward that the runtime runs with W: a convolution's gradient of its weight costs what
    that of its input does (`passes/tidy/split_convolutions.py`)."""
    if node.target is not torch.ops.aten.convolution_backward.default:
        return 0.0
    wanted: list[bool] = argument(node, 10, "output_mask", None)
    return wanted[1] / max(1, wanted[0] + wanted[1])


class _Seconds:
    """(passes, segments) seconds of one way of recomputation; `once`: (segments,) per step."""

    def __init__(self, solved: Solved, built: Built, labels: Labels, gather_once: bool) -> None:
        self.solved, self.lifetimes = solved, solved.lifetimes
        self._step = StepValues(solved.built, solved.labels, solved.lifetimes, solved.mesh)
        self._made_once = self._step.variables if gather_once else frozenset[int]()
        self.weights = solved.weights
        size = len(self.lifetimes.segments.names)
        self.of_passes: Floats = np.zeros((3, size))
        self.once: Floats = np.zeros(size)
        self._value_of_copy = {index: key for key, index in solved.built.copies.items()}
        self._parameters = {solved.built.placeholders[node]: node for node in solved.built.placeholders}
        self._places = [self._place(index, variable) for index, variable in enumerate(solved.built.variables)]
        self._read_nodes(built, labels)
        self._read_edges(built, labels)
        self._read_views()
        self._read_totals()

    def _place(self, index: int, variable: Variable) -> tuple[int, int]:
        """(pass, segment) of what a variable does, and of what reaches it."""
        lifetimes = self.lifetimes
        if variable.kind == "operator":
            return self._pass_of(variable.node), lifetimes.segment[variable.node]
        if variable.kind == "copy":
            value, phase = self._value_of_copy[index]
            readers = lifetimes.forward_readers if phase == "forward" else lifetimes.backward_readers
            found = readers[value]
            passes = {self._pass_of(reader) for reader in found}
            return (BACKWARD if BACKWARD in passes else passes.pop()), lifetimes.segment[found[0]]
        if variable.kind == "parameter":
            return WEIGHT, first_segment(lifetimes, variable.node)
        return FORWARD, lifetimes.segments.last

    def _pass_of(self, node: fx.Node) -> int:
        if node.meta["phase"] != "backward":
            return FORWARD
        return WEIGHT if node in self.weights else BACKWARD

    def _add(self, place: tuple[int, int], plain: float, expanded: float) -> None:
        """What recomputation adds to a cost of forward is paid in backward."""
        self.of_passes[place] += plain
        self.of_passes[BACKWARD if place[0] == FORWARD else place[0], place[1]] += expanded - plain

    def _read_nodes(self, built: Built, labels: Labels) -> None:
        for index, variable in enumerate(self.solved.built.variables):
            label = int(self.solved.labels[index])
            cost = float(variable.costs[label])
            if variable.kind == "parameter":
                choice, node = variable.labels[label], variable.node
                gather = self.solved.prices.redistribution_seconds(
                    shape_of(node), tensor_bytes(node), choice.stored, choice.used
                )
                segment = first_segment(self.lifetimes, node)
                gathers = self.once if self._made_once else self.of_passes[FORWARD]
                gathers[segment] += min(gather, cost)
                self.once[segment] += max(0.0, cost - gather)
            elif index in self._made_once:
                self.once[self._places[index][1]] += cost
            else:
                (turn, segment), part = self._places[index], weight_share(variable.node)
                again = float(built.variables[index].costs[labels[index]])
                self._add((WEIGHT, segment), part * cost, part * again)
                self._add((turn, segment), (1.0 - part) * cost, (1.0 - part) * again)

    def _read_edges(self, built: Built, labels: Labels) -> None:
        arrived: set[tuple[int, float]] = set()
        for plain, expanded in zip(self.solved.built.problem.edges, built.problem.edges, strict=True):
            cost = float(plain.costs[self.solved.labels[plain.source], self.solved.labels[plain.target]])
            if cost < STILL_SECONDS:
                continue
            made_once = plain.source in self._made_once
            if made_once or self.solved.built.variables[plain.source].kind == "copy":
                if (plain.source, cost) in arrived:
                    continue
                arrived.add((plain.source, cost))
            if made_once or self._is_summed_once(plain.source, plain.target):
                self.once[self._places[plain.source if made_once else plain.target][1]] += cost
                continue
            paid = float(expanded.costs[labels[plain.source], labels[plain.target]])
            self._add(self._places[plain.target], cost, paid)

    def _is_summed_once(self, source: int, target: int) -> bool:
        """Whether the sum of a gradient over ranks waits for the end of the step."""
        if self.solved.built.variables[target].kind != "parameter":
            return False
        return bool(self._made_once) or self._step.stays_as_large(source, target)

    def _read_views(self) -> None:
        """Eager dispatch of a view costs what any small operator costs."""
        device = self.solved.prices.cluster.device
        if device.kind != "cpu":
            return
        nodes = [n for n in self.lifetimes.in_order[0].graph.nodes if n.op == "call_function"]
        names = ((str(node.meta["phase"]), str(node.meta["operator"])) for node in nodes)
        for node, segment in zip(nodes, self.lifetimes.segments.along(names), strict=True):
            if base_of(node)[1]:
                late = node.meta["phase"] == "backward"
                self.of_passes[BACKWARD if late else FORWARD, segment] += device.launch_seconds

    def _read_totals(self) -> None:
        solved = self.solved
        for source, seconds in adding_seconds(solved.built, solved.labels, solved.lifetimes, solved.prices):
            turn = WEIGHT if source in self.weights else BACKWARD
            self.of_passes[turn, self.lifetimes.segment[source]] += seconds


class _Bytes:
    """(segments,) bytes of one way of recomputation."""

    def __init__(self, solved: Solved, way: SolvedWay, micro_batches: int, gather_once: bool) -> None:
        self.lifetimes, self.built, self.labels = solved.lifetimes, way.built, way.labels
        self._mesh, self._weights = solved.mesh, solved.weights
        size = len(self.lifetimes.segments.names)
        self.states: Floats = np.zeros(size)
        self.updates: Floats = np.zeros(size)
        self.saved: Floats = np.zeros(size)
        self.arrived: Floats = np.zeros(size)
        """Behind every segment, what a stage that begins there keeps of what a segment in front counts."""
        self.handed: Floats = np.zeros(size)
        """Of what a segment keeps, what a stage that ends there does not, as the stage behind runs what reads it."""
        self._change = np.zeros(self.lifetimes.end + 2)
        late = solved.weights | {node for node in self.lifetimes.in_order if weight_share(node)}
        self._read_by_weights = {value for node in late for value in _operands(node)}
        self._freed: dict[int, list[tuple[int, float, bool]]] = {}
        """Segment -> (last position, bytes, whether W reads it) of what it keeps and backward drops."""
        self._turn = sum(node.meta["phase"] != "backward" for node in self.lifetimes.in_order)
        step = StepValues(solved.built, solved.labels, solved.lifetimes, solved.mesh) if gather_once else None
        for live in way.live_bytes:
            if step is None or not self._is_gathered(live.variable, step):
                self._read(live, micro_batches)
        if step is not None:
            self._hold_gathered(step)
        self.extra = self._extra() + way.ahead_bytes
        self.weight_saved = self._weight_saved()

    def _read(self, live: LiveBytes, micro_batches: int) -> None:
        held = float(live.bytes[self.labels[live.variable]])
        if not held:
            return
        variable = self.built.variables[live.variable]
        if variable.kind == "parameter":
            found = self.updates if live.first == self.lifetimes.end else self.states
            for segment in reading_segments(self.lifetimes, variable.node):
                found[segment] += held
        elif variable.kind == "data":
            self.states[self.lifetimes.segments.last] += held * micro_batches
        elif live.first < self._turn <= live.last:
            keeper = self._keeper(variable.node)
            self.saved[keeper] += held
            self.arrived[keeper : max(self._wanted_in(variable), default=keeper)] += held
            self.handed[keeper] += held if self._is_left(variable.node, keeper) else 0.0
            late = not self._read_by_weights.isdisjoint(_values(variable.node))
            self._freed.setdefault(keeper, []).append((live.last, held, late))
        else:
            self._change[live.first] += held
            self._change[self._last_here(variable.node, live) + 1] -= held

    def _last_here(self, node: fx.Node, live: LiveBytes) -> int:
        """Where a value ends: a part of a gradient, which a stage adds to a total of its own, with its segment."""
        if node not in self._weights:
            return live.last
        segments = (self.lifetimes.segment[other] for other in self.lifetimes.in_order[live.first : live.last + 1])
        return live.first + sum(1 for _ in takewhile(self.lifetimes.segment[node].__eq__, segments)) - 1

    def _is_gathered(self, variable: int, step: StepValues) -> bool:
        """Whether it is a copy that a stage makes once per step, and holds with its states."""
        return self.built.variables[variable].kind == "copy" and variable in step.variables

    def _hold_gathered(self, step: StepValues) -> None:
        for index, variable in enumerate(self.built.variables):
            if variable.kind == "parameter":
                held = step.held_bytes(index)
                for segment in reading_segments(self.lifetimes, variable.node):
                    self.states[segment] += held

    def _keeper(self, node: fx.Node) -> int:
        """The segment that keeps a value for its backward."""
        own = self.lifetimes.segment.get(node, 0)
        readers = self.lifetimes.backward_segments(node) if node in self.lifetimes.segment else set()
        readers = readers or {
            self.lifetimes.segment[reader]
            for value in _values(node)
            for reader in self.lifetimes.forward_readers.get(value, ())
        }
        return own if own in readers or not readers else min(readers)

    def _is_left(self, node: fx.Node, keeper: int) -> bool:
        """Whether what reads a value in backward of its segment runs in the stage behind, which has it, too
        (`place_stages`): a border that is read beside gradients only."""
        lifetimes = self.lifetimes
        if lifetimes.segment.get(node) != keeper:
            return False
        forward = {lifetimes.segment[r] for value in _values(node) for r in lifetimes.forward_readers.get(value, ())}
        backward = [r for value in _values(node) for r in lifetimes.backward_readers.get(value, ())]
        beside = {s for r in backward if lifetimes.segment[r] == keeper for s, _ in _operands(r)} - {node}
        return bool(forward) and keeper not in forward and all(s.meta.get("phase") == "backward" for s in beside)

    def _wanted_in(self, variable: Variable) -> set[int]:
        """The segments whose backward reads an operator of forward, or makes again what reads it."""
        node, lifetimes = variable.node, self.lifetimes
        if node not in lifetimes.segment:
            return set()
        return lifetimes.backward_segments(node) if variable.availability is None else lifetimes.reading_segments(node)

    def _extra(self) -> Floats:
        """(3, segments) the most that comes and goes within a pass; what the segment itself keeps makes room in
        backward behind its last reader, but in one that is split for what W reads."""
        found = np.zeros((3, len(self.saved)))
        for position, (node, held) in enumerate(zip(self.lifetimes.in_order, np.cumsum(self._change), strict=False)):
            segment = self.lifetimes.segment[node]
            if node.meta["phase"] != "backward":
                found[FORWARD, segment] = max(found[FORWARD, segment], held)
                continue
            room = {late: self._room(segment, position, late) for late in (False, True)}
            found[BACKWARD, segment] = max(found[BACKWARD, segment], held - room[False])
            found[WHOLE, segment] = max(found[WHOLE, segment], held - room[False] - room[True])
        found[BACKWARD:] += self._passed_through()
        return found

    def _room(self, segment: int, position: int, late: bool) -> float:
        """What backward of a segment has dropped in front of a position. late: of what W reads."""
        freed = self._freed.get(segment, ())
        return sum(size for last, size, of_weight in freed if last < position and of_weight is late)

    def _passed_through(self) -> Floats:
        """(segments,) the largest value on the way through a span, which live bytes leave out (`live_bytes.py`)."""
        found = np.zeros(len(self.saved))
        for node, segment in self.lifetimes.segment.items():
            if not self.lifetimes.is_span(segment) or node.meta["phase"] == "backward":
                continue
            variable, label = self.built.variables[self.built.operators[node]], self._label_of(node)
            if state_of(variable, label) == RECOMPUTED:
                for output in range(len(variable.layouts)):
                    if (node, output) not in self.lifetimes.backward_readers:
                        found[segment] = max(
                            found[segment], _local_bytes(variable, label, node, output, self._mesh)
                        )
        return found

    def _label_of(self, node: fx.Node) -> int:
        return int(self.labels[self.built.operators[node]])

    def _weight_saved(self) -> Floats:
        """What the operators of W read, but for parameters."""
        found = np.zeros(len(self.saved))
        weights = [node for node in self.lifetimes.in_order if node in self._weights or weight_share(node)]
        read: dict[Value, tuple[int, float]] = {}  # where several read a value, the last in the order of the program
        for node in weights:
            index = self.built.operators[node]
            strategies, label = self.built.variables[index].strategies, int(self.labels[index])
            assert strategies is not None
            for operand, wanted in zip(tensor_operands(node), strategies.inputs, strict=True):
                value, _ = base_of(operand)
                if value[0].op == "placeholder" or value[0] in self._weights:
                    continue
                layout = wanted.distinct[wanted.index[label]]
                part = local_fraction(layout, shape_of(*value_of(operand)), self._mesh)
                read[value] = self.lifetimes.segment[node], part * tensor_bytes(*value)
        for segment, size in read.values():
            found[segment] += size
        return found


def _parameter_bytes(solved: Solved) -> Floats:
    """(segments,) of one device; two devices add up their gradients by sending each other as much."""
    found = np.zeros(len(solved.lifetimes.segments.names))
    for parameter, held in _held_parameters(solved):
        for segment in reading_segments(solved.lifetimes, parameter):
            found[segment] += held
    return found


def _shared_parameters(solved: Solved, runs: Runs) -> Iterator[tuple[tuple[int, ...], float]]:
    """(runs that read a parameter, its bytes on one device), of those that several read."""
    for parameter, held in _held_parameters(solved):
        blocks = {runs.of_segment[segment] for segment in reading_segments(solved.lifetimes, parameter)}
        if len(blocks) > 1:
            yield tuple(sorted(blocks)), held


def _held_parameters(solved: Solved) -> Iterator[tuple[fx.Node, float]]:
    """Every parameter with its bytes on one device, as it is stored."""
    for index, variable in enumerate(solved.built.variables):
        if variable.kind == "parameter":
            stored = variable.labels[int(solved.labels[index])].stored
            part = local_fraction(stored, shape_of(variable.node), solved.mesh)
            yield variable.node, part * tensor_bytes(variable.node)


def _crossing_bytes(solved: Solved, runs: Runs) -> Floats:
    """(runs - 1,) bytes of one device that cross every border in forward, in the layouts of their producers."""
    found = np.zeros(max(0, len(runs.names) - 1))
    for value, readers in solved.lifetimes.forward_readers.items():
        node, output = value
        if node not in solved.lifetimes.segment or node in solved.lifetimes.everywhere:
            continue
        first = runs.of(solved.lifetimes, node)
        last = max((runs.of(solved.lifetimes, reader) for reader in readers), default=first)
        variable = solved.built.variables[solved.built.operators[node]]
        layouts = variable.layouts[output]
        if last > first and layouts is not None:
            layout = layouts.distinct[layouts.index[solved.labels[solved.built.operators[node]]]]
            part = local_fraction(layout, shape_of(node, output), solved.mesh)
            found[first:last] += part * tensor_bytes(node, output)
    return found


def reading_segments(lifetimes: Lifetimes, parameter: fx.Node) -> list[int]:
    """Segments whose forward, or else backward, reads a parameter or a cast of it; the first where nothing does."""
    forward, backward = lifetimes.forward_readers, lifetimes.backward_readers
    readers = _readers(lifetimes, forward, parameter) or _readers(lifetimes, backward, parameter)
    return sorted({lifetimes.segment[reader] for reader in readers}) or [0]


def _readers(lifetimes: Lifetimes, readers: Mapping[Value, list[fx.Node]], node: fx.Node) -> list[fx.Node]:
    """Who reads a value, behind what every stage makes for itself."""
    found: list[fx.Node] = []
    for reader in readers.get((node, 0), ()):
        behind = _readers(lifetimes, readers, reader) if reader in lifetimes.everywhere else []
        found += behind or [reader]
    return found


def first_segment(lifetimes: Lifetimes, parameter: fx.Node) -> int:
    """The first segment whose operators read a parameter."""
    return reading_segments(lifetimes, parameter)[0]


def _operands(node: fx.Node) -> list[Value]:
    """What an operator reads, behind views."""
    return [base_of(operand)[0] for operand in tensor_operands(node)]


def _values(node: fx.Node) -> list[Value]:
    value = node.meta["val"]
    return [(node, output) for output in range(len(value) if isinstance(value, tuple | list) else 1)]
