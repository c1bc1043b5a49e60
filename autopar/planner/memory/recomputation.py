"""Recomputation as a dimension of the search: what backward finds of every value of forward.

    dropped      backward cannot see it
    saved        kept from forward on; costs bytes until its last reader
    recomputed   computed again in backward of its own segment; costs its seconds and those of its edges twice, and once
                 more for every time that it is given up and made anew (`nested_spans.py`)
    on host      saved, and there in between (`one_mesh/host_labels.py` adds these labels)
    in a form    saved, rounded or as a bit a value (`one_mesh/form_labels.py` adds these)

    x (saved) -> silu (recomputed) -> mul (dropped) -> mm        backward of mm reads mul: forbidden, it is dropped
    x (saved) -> silu (recomputed) -> mul (recomputed) -> mm     silu and mul are computed twice, two tensors less live

`expand` gives every label of a forward operator one copy per state that makes sense for it, and tells by edges which
states go together: backward reads nothing that is dropped, and what is recomputed reads values that are saved, or
recomputed in the same segment (`time_segments.py`). So chains end at the borders of segments, and backward of a block
holds the recomputed values of this block only; where that does not do, spans of blocks are one segment each
(`spans.py`). "none", "selective" and "full" recomputation of a block are points of this space. A weight that backward
reads is gathered there anyway, and a recomputed operator is priced to find it: that is exact where both want it in
one layout, and one gather too cheap where they do not. Other redistributions of its operands are paid again.

Left out, because it hardly pays: the last segment (backward begins there, and what it needs first is what forward made
last; `fewest_reruns.py` asks), and operators that neither backward nor a recomputed one reads. Left out, because it
must not be: operators that write, and values that another segment reads in backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.passes.random_operators import is_random
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.factorisation import Value
from autopar.planner.problem.prices import Floats
from autopar.planner.problem.strategies import LayoutSet, Strategies
from autopar.planner.solver import FORBIDDEN, Edge
from autopar.plans.plan_value import MASK, ROUNDED_BITS
from autopar.request.constraints import Recompute

DROPPED, SAVED, RECOMPUTED, ON_HOST = 0, 1, 2, 3
FORM_STATES = {form: ON_HOST + number for number, form in enumerate((MASK, *ROUNDED_BITS), 1)}
FORM_OF = {state: form for form, state in FORM_STATES.items()}
States: TypeAlias = tuple[int, ...]
"""States of one variable; empty: it has none (a parameter, a batch input, anything of backward)."""


def expand(
    built: Built,
    lifetimes: Lifetimes,
    recompute: Recompute | None = None,
    by_operator: Mapping[fx.Node, Recompute] | None = None,
) -> Built:
    """The same problem with a state in every label of what forward computes.

    recompute: None lets the search choose; "none" saves everything that backward reads; "selective" never runs a heavy
    operator (product, attention) twice; "full" saves only what the segments hand to each other. by_operator: the same
    for single operators.
    """
    open_states = _OpenStates(built, lifetimes, recompute, by_operator or {}).open_states
    again = made_again(lifetimes, lambda node: RECOMPUTED in open_states[built.operators[node]])
    anew = {built.operators[node]: _anew(lifetimes, node, firsts) for node, firsts in again.items()}
    for (value, phase), index in built.copies.items():
        if phase == "forward":
            readers = (anew.get(built.operators[each], ()) for each in lifetimes.forward_readers.get(value, ()))
            anew[index] = max(readers, key=len, default=())
    labels = _Labels()
    variables = [
        labels.variable(variable, states, anew.get(index, ())) if states else variable
        for index, (variable, states) in enumerate(zip(built.variables, open_states, strict=True))
    ]
    edges = _Edges(built, lifetimes, open_states, anew)
    problem = replace(
        built.problem,
        node_costs=tuple(variable.costs for variable in variables),
        edges=tuple(map(edges.expanded, built.problem.edges)),
    )
    return replace(built, problem=problem, variables=variables)


def made_again(lifetimes: Lifetimes, may_be_recomputed: Callable[[fx.Node], bool]) -> dict[fx.Node, tuple[int, ...]]:
    """Operator that may be recomputed -> the positions at which backward makes a copy, if what reads it is recomputed
    as well: where it first wants one, and where it does so once more behind each at which that was given up."""
    found: dict[fx.Node, tuple[int, ...]] = {}
    for node in reversed(lifetimes.in_order):
        if node.meta["phase"] == "backward" or not may_be_recomputed(node):
            continue
        value = node.meta["val"]
        values = [(node, output) for output in range(len(value) if isinstance(value, tuple | list) else 1)]
        wants = [lifetimes.position[reader] for v in values for reader in lifetimes.backward_readers.get(v, ())]
        wants += [
            position
            for v in values
            for reader in lifetimes.forward_readers.get(v, ())
            if lifetimes.segment[reader] == lifetimes.segment[node]
            for position in found.get(reader, ())
        ]
        if wants:
            found[node] = lifetimes.first_wants(node, wants)
    return found


def _anew(lifetimes: Lifetimes, node: fx.Node, firsts: Sequence[int]) -> tuple[str, ...]:
    """The operators of backward before which the second and every further copy of an operator is made."""
    given_up = lifetimes.given_up.get(node, ())
    moments = [given_up[bisect_right(given_up, first) - 1] for first in firsts[1:]]
    return tuple(str(lifetimes.in_order[position].meta["operator"]) for position in moments)


def with_states(built: Built, expanded: Built, assignment: NDArray[np.int64], preferred: States) -> NDArray[np.int64]:
    """Labels of the expanded problem for an assignment of the plain one, each in the first preferred state it has."""
    found = assignment.copy()
    for index, variable in enumerate(expanded.variables):
        if variable.availability is not None:
            size = len(built.variables[index].costs)
            states = variable.availability[::size].tolist()
            state = next((state for state in preferred if state in states), states[0])
            found[index] += size * states.index(state)
    return found


def state_of(variable: Variable, label: int) -> int | None:
    """The state in a label; None where the problem is not expanded."""
    return None if variable.availability is None else int(variable.availability[label])


def is_made_anywhere(node: fx.Node) -> bool:
    """Whether an operator reads nothing and draws nothing: each phase makes its own, and it is never saved."""
    return not node.all_input_nodes and not is_random(node)


def repeatable(
    built: Built, recompute: Recompute | None, by_operator: Mapping[fx.Node, Recompute]
) -> Callable[[fx.Node], bool]:
    """Whether an operator of forward may run twice at all: it writes nothing, and what was asked for allows it."""

    def may_repeat(node: fx.Node) -> bool:
        target, asked = node.target, by_operator.get(node, recompute)
        mutates = not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable
        return not mutates and asked != "none" and not (asked == "selective" and node in built.heavy)

    return may_repeat


class _OpenStates:
    """The states of every variable, decided from the last operator of forward to the first."""

    def __init__(
        self,
        built: Built,
        lifetimes: Lifetimes,
        recompute: Recompute | None,
        by_operator: Mapping[fx.Node, Recompute],
    ) -> None:
        self.built, self.lifetimes, self.recompute, self.by_operator = built, lifetimes, recompute, by_operator
        self._may_repeat = repeatable(built, recompute, by_operator)
        self.open_states: list[States] = [()] * len(built.variables)
        for node, index in reversed(built.operators.items()):
            if node.meta["phase"] != "backward":
                outputs = range(len(built.variables[index].layouts))
                readers = [reader for output in outputs for reader in lifetimes.forward_readers.get((node, output), ())]
                self._decide_copies(node, len(outputs))
                self.open_states[index] = self._of_operator(node, readers)
        for node in built.placeholders:
            self._decide_copies(node, 1)

    def _of_operator(self, node: fx.Node, readers: Sequence[fx.Node]) -> States:
        if is_made_anywhere(node):
            return ()
        again = [reader for reader in readers if self._may_recompute(reader)]
        needed = bool(self.lifetimes.kept_outputs(node))
        if not needed and not again:
            return (DROPPED,)
        homes = {self.lifetimes.segment[reader] for reader in again}
        home = self.lifetimes.segment[node]
        recomputable = self._is_pure(node) and (needed or home in homes)
        if self._asked(node) == "full" and recomputable and homes <= {home}:
            return (RECOMPUTED,) if needed else (DROPPED, RECOMPUTED)
        states = (SAVED,) if needed else (DROPPED, SAVED)
        return (*states, RECOMPUTED) if recomputable else states

    def _is_pure(self, node: fx.Node) -> bool:
        """Whether a node may run again in backward of its own segment, and only there."""
        lifetimes = self.lifetimes
        home = lifetimes.segment[node]
        is_last = home == lifetimes.segments.last and not lifetimes.repeats_last
        if is_last or not self._may_repeat(node):
            return False
        return all(segment == home for segment in lifetimes.backward_segments(node))

    def _asked(self, node: fx.Node) -> Recompute | None:
        return self.by_operator.get(node, self.recompute)

    def _may_recompute(self, node: fx.Node) -> bool:
        return RECOMPUTED in self.open_states[self.built.operators[node]]

    def _decide_copies(self, node: fx.Node, num_outputs: int) -> None:
        """A copy that several operators of forward share is made again where one of them is computed again."""
        for output in range(num_outputs):
            index = self.built.copies.get(((node, output), "forward"))
            if index is not None:
                readers = self.lifetimes.forward_readers.get((node, output), ())
                again = any(self._may_recompute(reader) for reader in readers)
                self.open_states[index] = (DROPPED, RECOMPUTED) if again else (DROPPED,)


class _Labels:
    """Arrays with one part per state, shared between equal variables."""

    def __init__(self) -> None:
        self._known: dict[Hashable, object] = {}
        self._alive: list[object] = []

    def variable(self, variable: Variable, states: States, anew: tuple[str, ...]) -> Variable:
        times = len(states)
        return replace(
            variable,
            anew=anew,
            costs=self._costs(variable.costs, states, 2.0 + len(anew)),
            layouts=tuple(None if layouts is None else self._layouts(layouts, times) for layouts in variable.layouts),
            strategies=None if variable.strategies is None else self._strategies(variable.strategies, times),
            availability=np.repeat(np.array(states), len(variable.costs)),
        )

    def _costs(self, costs: Floats, states: States, times: float) -> Floats:
        key = (id(costs), states, times)
        if key not in self._known:
            parts = [costs * (times if state == RECOMPUTED else 1.0) for state in states]
            self._keep(key, costs, np.concatenate(parts))
        found = self._known[key]
        assert isinstance(found, np.ndarray)
        return found

    def _layouts(self, layouts: LayoutSet, times: int) -> LayoutSet:
        key = (id(layouts), times)
        if key not in self._known:
            self._keep(key, layouts, LayoutSet(layouts.distinct, np.tile(layouts.index, times)))
        found = self._known[key]
        assert isinstance(found, LayoutSet)
        return found

    def _strategies(self, strategies: Strategies, times: int) -> Strategies:
        key = (id(strategies), times)
        if key not in self._known:
            tiled = Strategies(
                axes=strategies.axes * times,
                inputs=tuple(self._layouts(layouts, times) for layouts in strategies.inputs),
                outputs=tuple(None if one is None else self._layouts(one, times) for one in strategies.outputs),
                fraction=np.tile(strategies.fraction, times),
                implementations=strategies.implementations * times,
            )
            self._keep(key, strategies, tiled)
        found = self._known[key]
        assert isinstance(found, Strategies)
        return found

    def _keep(self, key: Hashable, source: object, made: object) -> None:
        self._alive.append(source)  # an id names one object only as long as that lives
        self._known[key] = made


@dataclass(frozen=True, slots=True)
class _Kind:
    """What decides the cost of an edge per pair of states. reads: "forward" for an operator or copy of forward,
    "backward" for a reader that must find the value, "result" for what is returned. times: how often a recomputed
    reader pays the edge. saved_counts, same_segment: a saved, a recomputed source serves it."""

    reads: Literal["forward", "backward", "result"]
    times: float = 2.0
    saved_counts: bool = True
    same_segment: bool = True

    def factor(self, source: int | None, target: int | None) -> float:
        """How often a pair of states pays; infinity where it is forbidden."""
        if self.reads == "backward":
            return np.inf if source == DROPPED else 1.0
        if self.reads == "result" or target != RECOMPUTED:
            return 1.0
        served = (
            source is None or (source == SAVED and self.saved_counts) or (source == RECOMPUTED and self.same_segment)
        )
        return self.times if served else np.inf


class _Edges:
    """Edge tables with one block per pair of states."""

    def __init__(
        self,
        built: Built,
        lifetimes: Lifetimes,
        open_states: Sequence[States],
        anew: Mapping[int, tuple[str, ...]],
    ) -> None:
        self.built, self.lifetimes, self.open_states, self.anew = built, lifetimes, open_states, anew
        self._value_of_copy = {index: value for (value, _), index in built.copies.items()}
        self._known: dict[Hashable, Floats] = {}

    def expanded(self, edge: Edge) -> Edge:
        open_states = self.open_states[edge.source], self.open_states[edge.target]
        if not any(open_states):
            return edge
        kind = self._kind(edge)
        key = (id(edge.costs), open_states, kind)  # the plain problem keeps its tables alive
        if key not in self._known:
            self._known[key] = _blocks(edge.costs, open_states, kind)
        return replace(edge, costs=self._known[key])

    def _kind(self, edge: Edge) -> _Kind:
        target = self.built.variables[edge.target]
        if target.kind == "data":
            return _Kind("result")
        if target.kind == "parameter" or self._is_backward(target):
            return _Kind("backward")
        value = self._read(edge)
        home = self.lifetimes.segment.get(value[0])
        from_copy = self.built.variables[edge.source].kind == "copy"
        return _Kind(
            "forward",
            times=1.0 if self.lifetimes.is_weight_of_backward(value) else 2.0 + len(self.anew.get(edge.target, ())),
            saved_counts=self.lifetimes.is_kept(value),
            same_segment=from_copy or all(home == segment for segment in self._segments(edge, value)),
        )

    def _segments(self, edge: Edge, value: Value) -> list[int]:
        """Segments of the operators that read through an edge."""
        target = self.built.variables[edge.target]
        if target.kind != "copy":
            return [self.lifetimes.segment[target.node]]
        readers = self.lifetimes.forward_readers.get(value, ())
        return [self.lifetimes.segment[r] for r in readers if RECOMPUTED in self.open_states[self.built.operators[r]]]

    def _read(self, edge: Edge) -> Value:
        """The value that travels over an edge to an operator or a copy of forward."""
        for index in (edge.target, edge.source):
            if index in self._value_of_copy:
                return self._value_of_copy[index]
        node = self.built.variables[edge.source].node
        read = self.lifetimes.outputs_read(self.built.variables[edge.target].node, node)
        return next(((node, output) for output in read if not self.lifetimes.is_kept((node, output))), (node, read[0]))

    @staticmethod
    def _is_backward(variable: Variable) -> bool:
        phase = variable.phase if variable.kind == "copy" else variable.node.meta["phase"]
        return bool(phase == "backward")


def _blocks(costs: Floats, open_states: tuple[States, States], kind: _Kind) -> Floats:
    sources: Sequence[int | None] = open_states[0] or (None,)
    targets: Sequence[int | None] = open_states[1] or (None,)

    def block(factor: float) -> Floats:
        return costs + FORBIDDEN if np.isinf(factor) else costs * factor

    return np.block([[block(kind.factor(source, target)) for target in targets] for source in sources])
