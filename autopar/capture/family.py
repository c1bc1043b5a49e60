"""Further sizes of a captured model without tracing it again.

    batch 8:   view(x, [512, 64])  arange(512)     traced
    batch 4:   view(x, [256, 64])  arange(256)     traced: the graphs are equal but for numbers, 512 -> 256 for 8 -> 4
    batch 6:   view(x, [384, 64])  arange(384)     computed: every number is affine in the size

Two programs of one model that align node by node make a `Family`: integers that differ between them are affine
functions of the one size that differs, floats are the factors of means, c / size. A third size is computed by putting
the numbers in and propagating fake tensors, whose shapes must be the predicted ones. Numbers alone do not prove that
the model does the same at that size (`x[:8]` is affine up to 8 rows only), so its forward is run on fake tensors as
well and must perform the predicted operators, with the predicted numbers. Where anything does not fit, the model is
traced again. Size 1 broadcasts and is always traced.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autopar._compat import LazyGraphModule, TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from autopar.capture.calls import Call
from autopar.capture.sized_values import SizedValues
from autopar.program import Input, Program

log = logging.getLogger(__name__)

CallsAt: TypeAlias = Callable[[Sequence[tuple[int, ...]]], tuple[Call, ...]]
"""Runs the forward on fake tensors of the given shapes, and says what it did."""


class _DoesNotFitError(Exception):
    """The programs or the size are no members of one family; the model is traced."""


@dataclass(frozen=True, slots=True)
class _Line:
    """The affine function through (x0, y0) and (x1, y1)."""

    x0: int
    x1: int

    def at(self, x: int, y0: int, y1: int) -> int:
        value = y0 + Fraction((y1 - y0) * (x - self.x0), self.x1 - self.x0)
        if value.denominator != 1 or (value < 0 <= min(y0, y1)):
            raise _DoesNotFitError(f"{y0} and {y1} give {value} at size {x}")
        return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Two programs that align, and the calls that their forwards make."""

    first: Program
    second: Program
    first_calls: tuple[Call, ...]
    second_calls: tuple[Call, ...]
    numbers: Mapping[Node, _Numbers]
    """Of the nodes of `first` whose arguments differ."""
    shapes: Mapping[Node, list[tuple[int, ...]]]
    """Of what the nodes of both make."""

    def at(self, shapes: Sequence[tuple[int, ...]], calls: CallsAt) -> Program | None:
        """The program for inputs of these shapes; None where it must be traced."""
        try:
            size, line = _size(self.first, self.second, shapes)
            program = self._instantiated(size, line)
            _check_calls(calls(shapes), self.first_calls, self.second_calls, size, line)
        except _DoesNotFitError as reason:
            log.info("the model is traced anew: %s", reason)
            return None
        return program

    def _instantiated(self, size: int, line: _Line) -> Program:
        graph, values = Graph(), SizedValues()
        copies: dict[Node, Node] = {}
        inputs: list[Input] = []
        entries = zip(self.first.inputs, self.second.inputs, strict=True)
        for one, two in zip(self.first.graph.nodes, self.second.graph.nodes, strict=True):
            node = copies[one] = graph.node_copy(one, copies.__getitem__)
            numbers = self.numbers.get(one)
            if numbers is not None:
                args, kwargs = numbers.at(size, line)
                node.args = map_arg(args, copies.__getitem__)
                node.kwargs = map_arg(kwargs, copies.__getitem__)
            if one.op == "placeholder":
                before, after = next(entries)
                shape = tuple(line.at(size, y0, y1) for y0, y1 in zip(before.shape, after.shape, strict=True))
                inputs.append(dataclasses.replace(before, shape=shape))
                values.give(node, one, shape)
            elif one.op == "call_function":
                self._compute(values, node, one, two, size, line)
        module = LazyGraphModule(self.first.graph_module, graph)
        return dataclasses.replace(self.first, graph_module=module, inputs=tuple(inputs))

    def _compute(self, values: SizedValues, node: Node, one: Node, two: Node, size: int, line: _Line) -> None:
        """`meta["val"]` of a call at the new size; its shapes must be the predicted ones."""
        try:
            values.compute(node, one)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise _DoesNotFitError(f"{node.format_node()}: {error}") from None
        found, first, second = _shapes(node), self.shapes[one], self.shapes[two]
        if found == first == second:
            return
        predicted = [
            tuple(line.at(size, y0, y1) for y0, y1 in zip(a, b, strict=True))
            for a, b in zip(first, second, strict=True)
        ]
        if found != predicted:
            raise _DoesNotFitError(f"{node.format_node()} has shapes {found}, predicted were {predicted}")


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The arguments of a node whose numbers differ between the two programs: leaves of both."""

    first: Sequence[Any]
    second: Sequence[Any]
    spec: TreeSpec

    def at(self, size: int, line: _Line) -> Any:
        """(args, kwargs) at a size."""
        return tree_unflatten(
            [_number(a, b, size, line) for a, b in zip(self.first, self.second, strict=True)], self.spec
        )


def predicts(first: Program, second: Program, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether inputs of these shapes are those of two programs but for the one size in which the two differ."""
    try:
        _size(first, second, shapes)
    except _DoesNotFitError:
        return False
    return True


def _size(first: Program, second: Program, shapes: Sequence[tuple[int, ...]]) -> tuple[int, _Line]:
    """The size that varies, and the line between the two that were traced."""
    before = list(zip(input_shapes(first), input_shapes(second), shapes, strict=True))
    varying = [(a, b, c) for one, two, new in before for a, b, c in zip(one, two, new, strict=True) if a != b]
    if not varying:
        raise _DoesNotFitError("the two programs have the same input shapes")
    a, b, size = varying[0]
    line = _Line(a, b)
    if min(a, b, size) < 2:
        raise _DoesNotFitError("a dim of size 1 broadcasts")
    for one, two, new in before:
        if tuple(line.at(size, y0, y1) for y0, y1 in zip(one, two, strict=True)) != tuple(new):
            raise _DoesNotFitError(f"inputs of shapes {one} and {two} do not predict {tuple(new)}")
    return size, line


def family(first: Program, second: Program, calls: Sequence[tuple[Call, ...]]) -> Family | None:
    """The family of two programs of one model at two sizes; None where they do not align."""
    same = (
        len(first.graph.nodes) == len(second.graph.nodes)
        and first.in_spec == second.in_spec
        and (first.outputs, first.output_leaves) == (second.outputs, second.output_leaves)
        and [_named(entry) for entry in first.inputs] == [_named(entry) for entry in second.inputs]
        and len(calls[0]) == len(calls[1])
    )
    if not same or not varies(first, second) or aligned(first, second) is None:
        return None
    nodes = [node for program in (first, second) for node in program.graph.nodes]
    return Family(
        first=first,
        second=second,
        first_calls=calls[0],
        second_calls=calls[1],
        numbers=dict(_varying(first, second)),
        shapes={node: _shapes(node) for node in nodes},
    )


def aligned(first: Program, second: Program) -> dict[Node, Node] | None:
    """Node of the first program -> the node of the second that does the same but for numbers; None where one lacks."""
    if len(first.graph.nodes) != len(second.graph.nodes):
        return None
    pairs: dict[Node, Node] = {}
    for one, two in zip(first.graph.nodes, second.graph.nodes, strict=True):
        pairs[one] = two
        if not _aligned(one, two, pairs):
            log.debug("%s and %s do not align", one.format_node(), two.format_node())
            return None
    return pairs


def varies(first: Program, second: Program) -> bool:
    """Whether some input dim differs, and none of those is 1, which broadcasts."""
    dims = [
        pair
        for one, two in zip(input_shapes(first), input_shapes(second), strict=True)
        for pair in zip(one, two, strict=True)
        if pair[0] != pair[1]
    ]
    return bool(dims) and all(min(pair) > 1 for pair in dims)


def _named(entry: Input) -> Input:
    return dataclasses.replace(entry, shape=())


def _aligned(one: Node, two: Node, pairs: dict[Node, Node]) -> bool:
    if (one.op, one.target if one.op == "call_function" else "") != (
        two.op,
        two.target if two.op == "call_function" else "",
    ):
        return False
    if one.op == "get_attr" or any(one.meta.get(key) != two.meta.get(key) for key in ("operator", "phase")):
        return False
    leaves, others = tree_flatten((one.args, one.kwargs)), tree_flatten((two.args, two.kwargs))
    return leaves[1] == others[1] and all(
        pairs.get(a) is b if isinstance(a, Node) else _may_vary(a, b) for a, b in zip(leaves[0], others[0], strict=True)
    )


def _may_vary(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (type(a) in (int, float) or bool(a == b))


def _varying(first: Program, second: Program) -> Iterator[tuple[Node, _Numbers]]:
    for one, two in zip(first.graph.nodes, second.graph.nodes, strict=True):
        leaves, spec = tree_flatten((one.args, one.kwargs))
        others = tree_flatten((two.args, two.kwargs))[0]
        if any(not isinstance(a, Node) and a != b for a, b in zip(leaves, others, strict=True)):
            yield one, _Numbers(leaves, others, spec)


def _number(a: Any, b: Any, size: int, line: _Line) -> Any:
    """The number at `size`: an int on the line through a and b, a float as the factor of a mean, c / size."""
    if type(a) is int and type(b) is int and a != b:
        return line.at(size, a, b)
    if type(a) is float and type(b) is float and a != b:
        if not math.isclose(a * line.x0, b * line.x1, rel_tol=1e-12):
            raise _DoesNotFitError(f"{a} and {b} do not predict the factor at size {size}")
        return a * line.x0 / size
    return a


def _shapes(node: Node) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def input_shapes(program: Program) -> list[tuple[int, ...]]:
    """Shapes of the input tensors, in order."""
    return [entry.shape for entry in program.inputs if entry.role == "input"]


def _check_calls(
    calls: tuple[Call, ...], first: tuple[Call, ...], second: tuple[Call, ...], size: int, line: _Line
) -> None:
    if len(calls) != len(first):
        raise _DoesNotFitError(f"forward makes {len(calls)} calls at size {size}, {len(first)} before")
    for (target, arguments), (one, before), (_, after) in zip(calls, first, second, strict=True):
        same_form = target == one and len(arguments) == len(before) == len(after)
        if not same_form or any(
            x != _number(a, b, size, line) for x, a, b in zip(arguments, before, after, strict=True)
        ):
            raise _DoesNotFitError(f"forward calls {target} with {arguments} at size {size}")
