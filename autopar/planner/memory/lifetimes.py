"""Lifetimes: which operators of a program make and read every value, so that its bytes count where it lives.

x = layers.0/add     read by the backward of layers.1    saved in segment 1, dead once backward is below segment 2

Time is counted in positions: the operators of forward in program order, then those of backward, then the optimizer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy
from functools import cached_property
from itertools import pairwise

from torch import fx

from autopar.passes.stages.place_stages import made_everywhere
from autopar.planner.memory.time_segments import Segments, find_segments, span_of
from autopar.planner.problem.factorisation import Value
from autopar.planner.problem.graph_operators import base_of, operators
from autopar.program import Program
from autopar.rules.engine import tensor_operands


class Lifetimes:
    """Readers, segments and positions of one program, views folded away.

    segment, position: operator -> where it stands. forward_readers, backward_readers: value -> operators of a phase, in
    program order. gradient_position: placeholder of a parameter -> the operator that finishes its gradient. results:
    number of an output of the model -> what is returned, a view maybe. end: the position of the optimizer. starts: the
    first segment of every span that was joined, of the segments of `alone`. given_up: operator -> the positions of
    backward, ascending, before which what was made again of it is given up. repeats_last: whether the last segment may
    make something again.
    """

    def __init__(self, program: Program, find: Callable[[Program], Segments] = find_segments) -> None:
        self._program = program
        self.starts: Sequence[int] = ()
        self.given_up: Mapping[fx.Node, Sequence[int]] = {}
        self.repeats_last = False
        self.alone = self
        self.segments: Segments = find(program)
        nodes = operators(program)
        names = ((str(node.meta["phase"]), str(node.meta["operator"])) for node in nodes)
        self.segment: dict[fx.Node, int] = dict(zip(nodes, self.segments.along(names), strict=True))
        self.in_order = sorted(nodes, key=lambda node: bool(node.meta["phase"] == "backward"))
        self.position = {node: position for position, node in enumerate(self.in_order)}
        self.end = len(nodes)
        self.forward_readers: dict[Value, list[fx.Node]] = {}
        self.backward_readers: dict[Value, list[fx.Node]] = {}
        self._backward: dict[Value, set[int]] = {}
        for node in nodes:
            late = node.meta["phase"] == "backward"
            for operand in tensor_operands(node):
                value, _ = base_of(operand)
                readers = (self.backward_readers if late else self.forward_readers).setdefault(value, [])
                if node not in readers:
                    readers.append(node)
                if late:
                    self._backward.setdefault(value, set()).add(self.segment[node])
        self._parameters = {
            entry.name: node
            for node, entry in zip(program.placeholders, program.inputs, strict=True)
            if entry.role == "parameter"
        }
        self.gradient_position: dict[fx.Node, int] = {}
        self.results: dict[int, fx.Node] = {}
        self._read_returned(program)

    @cached_property
    def everywhere(self) -> set[fx.Node]:
        """What every stage of a pipeline makes for itself: what follows from data alone, and casts of parameters."""
        return made_everywhere(self._program)

    def _read_returned(self, program: Program) -> None:
        for number, (node, output) in enumerate(zip(program.returned, program.outputs, strict=True)):
            if not isinstance(node, fx.Node):
                continue
            value, _ = base_of(node)
            if output.role == "output" and value[0] in self.position:
                self.results[number] = node
            if output.role == "gradient":
                if value[0].meta.get("phase") != "backward":
                    self._backward.setdefault(value, set()).add(0)  # a value of forward that is returned at the end
                if output.name in self._parameters:
                    self.gradient_position[self._parameters[output.name]] = self.position.get(value[0], 0)

    def joined(
        self,
        starts: Sequence[int],
        given_up: Mapping[fx.Node, Sequence[int]] | None = None,
        *,
        repeats_last: bool = False,
    ) -> Lifetimes:
        """The same with spans of segments as one each; starts: the first of every span (`spans.py`)."""
        found = copy(self)
        found.starts, found.given_up, found.repeats_last = starts, given_up or {}, repeats_last
        found.segments = self.segments.joined(starts)
        found.segment = {node: span_of(starts, segment) for node, segment in self.segment.items()}
        found._backward = {value: {span_of(starts, one) for one in read} for value, read in self._backward.items()}
        return found

    @property
    def lengths(self) -> list[int]:
        """How many segments every segment was joined of."""
        starts = self.starts or range(len(self.segments.names))
        return [end - first for first, end in pairwise((*starts, len(self.alone.segments.names)))]

    def is_span(self, segment: int) -> bool:
        """Whether a segment is several that were joined."""
        return self.lengths[segment] > 1

    def first_wants(self, node: fx.Node, wants: Iterable[int]) -> tuple[int, ...]:
        """Where backward first wants every copy that it makes of an operator; wants: all positions at which it does."""
        found: dict[int, int] = {}
        given_up = self.given_up.get(node, ())
        for position in sorted(wants):
            found.setdefault(bisect_right(given_up, position), position)
        return tuple(found.values())

    def backward_of(self, value: Value) -> Set[int]:
        """Segments whose backward reads a value."""
        return self._backward.get(value, frozenset())

    def backward_segments(self, node: fx.Node) -> set[int]:
        """Segments whose backward reads an output of an operator of forward."""
        return {segment for output in self.kept_outputs(node) for segment in self._backward[node, output]}

    def kept_outputs(self, node: fx.Node) -> list[int]:
        """Outputs that backward reads."""
        return sorted(output for value, output in self._outputs_of(node, self._backward))

    def saved_outputs(self, node: fx.Node) -> list[int]:
        """Outputs that are kept when an operator is saved: those that backward reads, else those that forward reads."""
        return self.kept_outputs(node) or sorted(output for _, output in self._outputs_of(node, self.forward_readers))

    def is_kept(self, value: Value) -> bool:
        """Whether saving its producer keeps this value."""
        return value[1] in self.saved_outputs(value[0])

    def is_weight_of_backward(self, value: Value) -> bool:
        """Whether a value is a parameter that backward reads by itself."""
        return value[0].op == "placeholder" and value in self._backward

    def reading_segments(self, node: fx.Node) -> set[int]:
        """Segments whose backward may want an output: to read it, or to compute from it again."""
        again = {
            self.segment[reader]
            for output in self.saved_outputs(node)
            for reader in self.forward_readers.get((node, output), ())
        }
        return self.backward_segments(node) | again

    def outputs_read(self, reader: fx.Node, source: fx.Node) -> list[int]:
        """Which outputs of `source` an operator reads."""
        read = (base_of(operand)[0] for operand in tensor_operands(reader))
        return sorted({output for node, output in read if node is source})

    @staticmethod
    def _outputs_of(node: fx.Node, readers: object) -> list[Value]:
        assert isinstance(readers, dict)
        value = node.meta["val"]
        count = len(value) if isinstance(value, tuple | list) else 1
        return [(node, output) for output in range(count) if (node, output) in readers]
