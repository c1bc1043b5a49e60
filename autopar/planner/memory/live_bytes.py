"""Live bytes: what a step keeps in memory, piece by piece: how many bytes under every label of one variable, and when.

    mm#3 (forward)      its output in its own layout       from mm#3 to its last reader of forward
    mm#3, saved         the same                           on to its last reader of backward
    mm#3, in a form     its output while forward reads it, in little room up to where backward first wants it, and
                        from there again as it was
    mm#3, recomputed    the same                           from where backward of its segment first wants it
    mul#9, a reader     its operand in the layout that     at mul#9
                        it wants
    a parameter         itself and its optimizer state     always; its gradient from where it is finished

Every piece depends on one decision only, so that rows of the problem can add them. What depends on two is approximated:
an operand that stays alive in the layout of its producer is counted again in the layout that the reader wants, unless
that is the smallest of all, which the producer may have as well. Buffers of collectives are left out. Both differ from
the lowered program, which is measured (`lowered_bytes.py`) and corrects the rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.layouts.placement import Layout, Mesh
from autopar.planner.memory.lifetimes import Lifetimes
from autopar.planner.memory.possible_forms import forms_of
from autopar.planner.memory.recomputation import (
    FORM_OF,
    ON_HOST,
    RECOMPUTED,
    SAVED,
    is_made_anywhere,
    made_again,
)
from autopar.planner.problem.build import Built, Variable
from autopar.planner.problem.factorisation import Value, shape_of, value_of
from autopar.planner.problem.graph_operators import base_of
from autopar.planner.problem.leaf_layouts import StateBytes
from autopar.planner.problem.prices import Floats, tensor_bytes
from autopar.planner.problem.strategies import LayoutSet, local_fraction
from autopar.plans.plan_value import DEVICE
from autopar.rules.engine import tensor_operands


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """Bytes per label of a variable that live from the position `first` to `last`, both included."""

    variable: int
    bytes: Floats
    first: int
    last: int


def find_live_bytes(
    built: Built, mesh: Mesh, state_bytes: Mapping[str, StateBytes], lifetimes: Lifetimes
) -> list[LiveBytes]:
    """Everything that a step holds. Equal operators share the arrays of bytes."""
    return list(_Reader(built, mesh, state_bytes, lifetimes).read())


class _Reader:
    """Reads the live bytes off one problem."""

    def __init__(self, built: Built, mesh: Mesh, state_bytes: Mapping[str, StateBytes], lifetimes: Lifetimes) -> None:
        self.built, self.mesh, self.state_bytes, self.lifetimes = built, mesh, state_bytes, lifetimes
        self._known: dict[Hashable, Floats] = {}
        self._again = made_again(lifetimes, lambda node: _may_be_recomputed(built.variables[built.operators[node]]))
        self._returned = {
            base_of(lifetimes.results[number])[0]: (index, shape_of(*value_of(lifetimes.results[number])))
            for number, index in built.outputs.items()
            if number in lifetimes.results
        }

    def read(self) -> Iterator[LiveBytes]:
        for node, index in self.built.placeholders.items():
            if self.built.variables[index].kind == "parameter":
                yield from self._parameter(node, index)
        for node, index in self.built.operators.items():
            if node.meta["phase"] == "backward":
                yield from self._outputs_of_backward(node, index)
            else:
                yield from self._outputs_of_forward(node, index)
            yield from self._operands(node, index)
        yield from self._copies()
        yield from self._results()

    # parameters

    def _parameter(self, node: fx.Node, index: int) -> Iterator[LiveBytes]:
        lifetimes, variable = self.lifetimes, self.built.variables[index]
        shape, elements, state = shape_of(node), math.prod(shape_of(node)), self.state_bytes[variable.name]
        here = np.array([label.stored_on == DEVICE for label in variable.labels])
        share = self._fractions([label.stored for label in variable.labels], shape)
        stored = share * here
        if not here.all():
            yield from self._brought(node, index, (share - stored) * tensor_bytes(node))
        yield LiveBytes(index, stored * (tensor_bytes(node) + elements * state.optimizer), 0, lifetimes.end)
        finished = lifetimes.gradient_position.get(node)
        if finished is not None and state.gradient:
            yield LiveBytes(index, stored * elements * state.gradient, finished + 1, lifetimes.end)
        if state.update:
            yield LiveBytes(index, stored * elements * state.update, lifetimes.end, lifetimes.end)
        kept = np.array([label.keep_gathered for label in variable.labels])
        forward, backward = self._positions((node, 0), "forward"), self._positions((node, 0), "backward")
        if kept.any() and forward and backward:
            used = self._fractions([label.used for label in variable.labels], shape)
            between = np.where(kept, used * tensor_bytes(node), 0.0)
            yield from _between(index, between, [*forward, *backward])

    def _brought(self, node: fx.Node, index: int, bytes_: Floats) -> Iterator[LiveBytes]:
        """A parameter that lies on the host, where an operator reads it; and its gradient, where that is made."""
        places = {*self._positions((node, 0), "forward"), *self._positions((node, 0), "backward")}
        finished = self.lifetimes.gradient_position.get(node)
        for position in (*sorted(places), *([] if finished is None else [finished])):
            yield LiveBytes(index, bytes_, position, position)

    # outputs

    def _outputs_of_backward(self, node: fx.Node, index: int) -> Iterator[LiveBytes]:
        for output, bytes_ in self._outputs(node, index):
            yield self._until_read((node, output), "backward", index, bytes_)

    def _outputs_of_forward(self, node: fx.Node, index: int) -> Iterator[LiveBytes]:
        """While forward reads them; then saved or again, as the label says."""
        variable = self.built.variables[index]
        saved_outputs = self.lifetimes.saved_outputs(node)
        for output, bytes_ in self._outputs(node, index):
            passing = self._until_read((node, output), "forward", index, bytes_)
            last = self._last_use((node, output))
            if output not in saved_outputs or last is None or is_made_anywhere(node):
                yield passing
                continue
            yield from self._brought_again(node, output, index, bytes_, last)
            yield from self._in_forms((node, output), index, bytes_, passing, last)
            if (node, output) in self._returned:  # held to the end, and saved beside that in another layout only
                yield passing
                beside = self._in_state(variable, self._beside(bytes_), SAVED)
                if beside is not None:
                    yield LiveBytes(index, beside, passing.last + 1, last)
                continue
            saved = self._in_state(variable, bytes_, SAVED)
            if saved is not None:
                yield LiveBytes(index, saved, passing.first, last)
            if saved is None:
                yield passing
            elif saved is not bytes_:
                yield LiveBytes(index, self._without(bytes_, saved), passing.first, passing.last)
            again = None if variable.availability is None else self._in_state(variable, bytes_, RECOMPUTED)
            if again is not None:
                yield from self._made_again((node, output), index, again, last)

    def _brought_again(self, node: fx.Node, output: int, index: int, bytes_: Floats, last: int) -> Iterator[LiveBytes]:
        """What waits on the host, from where backward first wants it to where it last does."""
        variable, value = self.built.variables[index], (node, output)
        if variable.availability is None or (brought := self._in_state(variable, bytes_, ON_HOST)) is None:
            return
        yield LiveBytes(index, brought, min([*self._uses(value), last]), last)

    def _in_forms(
        self, value: Value, index: int, bytes_: Floats, passing: LiveBytes, last: int
    ) -> Iterator[LiveBytes]:
        """What is saved in a form, beside itself as long as forward reads it, and itself again while backward does."""
        states = self.built.variables[index].availability
        for state in () if states is None else sorted({*states.tolist()} & FORM_OF.keys()):
            chosen = self._in_state(self.built.variables[index], bytes_, state)
            assert chosen is not None
            part = forms_of(self.lifetimes).kept_part(value, FORM_OF[state])
            if part == 1.0:
                yield LiveBytes(index, chosen, passing.last + 1, last)
                continue
            kept = self._part(chosen, part)
            first = min([*self._uses(value), last])
            yield LiveBytes(index, kept, passing.first, first)
            yield LiveBytes(index, chosen, first, last)

    def _made_again(self, value: Value, index: int, bytes_: Floats, end: int) -> Iterator[LiveBytes]:
        """From where backward first wants every copy to where it last does. What is made on the way through a span of
        segments is gone before the next one is made: together such values hold no more than one of them, which the
        lowered program shows."""
        node, lifetimes = value[0], self.lifetimes
        firsts, in_span = self._again.get(node, ()), lifetimes.is_span(lifetimes.segment[node])
        read = {lifetimes.position[reader] for reader in lifetimes.backward_readers.get(value, ())}
        for first, following in itertools.pairwise((*firsts, lifetimes.end + 1)):
            uses = [position for position in self._uses(value) if first <= position < following]
            last = end if following > lifetimes.end else max(uses, default=first)
            if last > first or first in read or not in_span:
                yield LiveBytes(index, bytes_, first, max(first, last))

    def _last_use(self, value: Value) -> int | None:
        """Where backward last wants a value of forward: to read it, or to compute from it again."""
        node, output = value
        found = self._uses(value)
        if not found and output in self.lifetimes.kept_outputs(node):
            return self.lifetimes.end  # a value of forward that is returned as a gradient
        return max(found, default=None)

    def _uses(self, value: Value) -> list[int]:
        found = [self.lifetimes.position[reader] for reader in self.lifetimes.backward_readers.get(value, ())]
        readers = self.lifetimes.forward_readers.get(value, ())
        return found + [position for reader in readers for position in self._again.get(reader, ())]

    def _until_read(self, value: Value, phase: str, index: int, bytes_: Floats) -> LiveBytes:
        """A value in its producer's layout: up to the reader that finds it in its own, or in a shared copy's."""
        made = self.lifetimes.position[value[0]]
        readers = [] if value in self._returned else self._positions(value, phase)
        return LiveBytes(index, bytes_, made, max(made, readers[0] - 1) if readers else made)

    def _results(self) -> Iterator[LiveBytes]:
        """Outputs of the model, in the layouts in which they are returned, live to the end."""
        for value, (index, shape) in self._returned.items():
            layouts = self.built.variables[index].layouts[0]
            assert layouts is not None
            bytes_ = self._local(layouts, shape, tensor_bytes(*value))
            yield LiveBytes(index, bytes_, self.lifetimes.position[value[0]] + 1, self.lifetimes.end)

    # operands and copies

    def _operands(self, node: fx.Node, index: int) -> Iterator[LiveBytes]:
        """What an operator reads, in the layouts that it wants, while it runs."""
        strategies = self.built.variables[index].strategies
        assert strategies is not None
        position = self.lifetimes.position[node]
        seen: set[Value] = set()
        for operand, wanted in zip(tensor_operands(node), strategies.inputs, strict=True):
            value, _ = base_of(operand)
            if value in seen or self._is_data(value[0]):
                continue
            seen.add(value)
            bytes_ = self._local(wanted, shape_of(*value_of(operand)), tensor_bytes(*value))
            yield LiveBytes(index, self._beside(bytes_) if self._stays(value, node) else bytes_, position, position)

    def _copies(self) -> Iterator[LiveBytes]:
        """Shared copies, between the operators that read them: there they count as operands."""
        for (value, phase), index in self.built.copies.items():
            if self._is_data(value[0]):
                continue
            layouts = self.built.variables[index].layouts[0]
            assert layouts is not None
            bytes_ = self._local(layouts, shape_of(*value), tensor_bytes(*value))
            readers = self._positions(value, phase)
            if readers and self._stays(value, self.lifetimes.in_order[readers[0]]):
                bytes_ = self._beside(bytes_)
            yield from _between(index, bytes_, readers)

    def _is_data(self, node: fx.Node) -> bool:
        """Inputs and constants are small, and there all the time."""
        return node.op != "call_function" and not self._is_parameter(node)

    def _is_parameter(self, node: fx.Node) -> bool:
        index = self.built.placeholders.get(node)
        return index is not None and self.built.variables[index].kind == "parameter"

    def _stays(self, value: Value, reader: fx.Node) -> bool:
        """Whether a value lives on in its producer's layout while an operator reads it."""
        node, output = value
        if self._is_parameter(node) or value in self._returned:
            return True
        if node.meta.get("phase") == "backward" or is_made_anywhere(node):
            return False
        return reader.meta["phase"] == "backward" or output in self.lifetimes.saved_outputs(node)

    def _positions(self, value: Value, phase: str) -> list[int]:
        lifetimes = self.lifetimes
        readers = lifetimes.backward_readers if phase == "backward" else lifetimes.forward_readers
        return sorted(lifetimes.position[reader] for reader in readers.get(value, ()))

    # arrays, shared between equal operators

    def _outputs(self, node: fx.Node, index: int) -> Iterator[tuple[int, Floats]]:
        for output, layouts in enumerate(self.built.variables[index].layouts):
            if layouts is not None:
                yield output, self._local(layouts, shape_of(node, output), tensor_bytes(node, output))

    def _local(self, layouts: LayoutSet, shape: tuple[int, ...], nbytes: int) -> Floats:
        key = ("local", id(layouts), shape, nbytes)  # the problem keeps its layouts alive
        if key not in self._known:
            self._known[key] = nbytes * self._fractions(layouts.distinct, shape)[layouts.index]
        return self._known[key]

    def _fractions(self, layouts: Iterable[Layout], shape: tuple[int, ...]) -> Floats:
        return np.array([local_fraction(layout, shape, self.mesh) for layout in layouts])

    def _beside(self, bytes_: Floats) -> Floats:
        """Bytes of a copy beside its source: nothing for the smallest layout, which the source may have."""
        return self._derived("beside", bytes_, lambda: np.where(bytes_ > bytes_.min() * (1 + 1e-9), bytes_, 0.0))

    def _in_state(self, variable: Variable, bytes_: Floats, state: int) -> Floats | None:
        """Bytes of the labels with this state; None if no label has it. Without states everything is saved."""
        states = variable.availability
        if states is None:
            return bytes_
        if not (states == state).any():
            return None
        return self._derived((state, states.tobytes()), bytes_, lambda: np.where(states == state, bytes_, 0.0))

    def _without(self, bytes_: Floats, saved: Floats) -> Floats:
        return self._derived(("without", id(saved)), bytes_, lambda: bytes_ - saved)

    def _part(self, bytes_: Floats, part: float) -> Floats:
        return self._derived(("part", part), bytes_, lambda: bytes_ * part)

    def _derived(self, what: Hashable, bytes_: Floats, make: Callable[[], Floats]) -> Floats:
        key = (what, id(bytes_))  # `_known` keeps both alive
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _may_be_recomputed(variable: Variable) -> bool:
    return variable.availability is not None and bool((variable.availability == RECOMPUTED).any())


def _between(index: int, bytes_: Floats, readers: Sequence[int]) -> Iterator[LiveBytes]:
    """Something that is read at these positions, wherever one does not read it."""
    for before, after in itertools.pairwise(readers):
        if after - before > 1:
            yield LiveBytes(index, bytes_, before + 1, after - 1)
