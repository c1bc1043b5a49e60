"""What a tensor made of constants holds, as a function of its index: exact, and never made whole.

    row, key = arange(n).view(n, 1), arange(n)         at (i, j): the whole numbers i and j
    key <= row, key > row - 8                          at (i, j): bools that i - j decides, so 2n - 1 of them are all
    where(key <= row, 0.0, -inf)                       the same, in float
    row >= 0                                           True, whatever the index

A value is read from its index backwards: a view moves indices, `arange` turns one into a number, and what is computed
of numbers is a sum of indices (`Line`), or computed by the operator itself for every i - j. What depends on an input, a
parameter, a random number, or on an index in another way has no such value: None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from autopar.passes.arguments import argument, arguments

aten = torch.ops.aten
ROW, KEY = -2, -1
"""The dims of a matrix of pairs whose indices are i and j."""


@dataclass(frozen=True, slots=True)
class Line:
    """A whole number: a constant and multiples of indices, by the dim that they are of."""

    constant: int = 0
    terms: tuple[tuple[int, int], ...] = ()

    @classmethod
    def index(cls, dim: int) -> Line:
        """The index of a dim."""
        return cls(0, ((dim, 1),))

    def plus(self, other: Line, times: int = 1) -> Line:
        """The sum with a multiple of another one."""
        terms = dict(self.terms)
        for dim, factor in other.terms:
            terms[dim] = terms.get(dim, 0) + times * factor
        kept = tuple(sorted((dim, factor) for dim, factor in terms.items() if factor))
        return Line(self.constant + times * other.constant, kept)

    @property
    def slope(self) -> int | None:
        """The factor of i - j, where it is all that the number depends on."""
        terms = dict(self.terms)
        factor = terms.pop(ROW, 0)
        return factor if not terms.keys() - {KEY} and terms.get(KEY, 0) == -factor else None


Value: TypeAlias = Line | Tensor | None
"""A tensor has the values for i - j from 1 - n to n - 1, or one where the operator's own tensor has no dims."""
Index: TypeAlias = tuple[Line, ...]
Compare: TypeAlias = Callable[[Any, Any], Any]

_COMPARES: Mapping[Any, Compare] = {
    getattr(getattr(aten, name), overload): getattr(operator, name)
    for name in ("le", "lt", "ge", "gt", "eq", "ne")
    for overload in ("Tensor", "Scalar")
}
_POINTWISE = frozenset({
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.bitwise_not.default,
    aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.logical_not.default,
    aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar, aten._to_copy.default,
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.neg.default, aten.abs.default,
    aten.minimum.default, aten.maximum.default, *_COMPARES,
})  # fmt: skip
_INTEGERS = (torch.int64, torch.int32)


class IndexValues:
    """Values of tensors for the pairs of a matrix (..., n, n) of these sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._known: dict[tuple[Node, Index], Value] = {}

    def of(self, node: Node) -> Tensor | None:
        """(2n - 1,) or (): what a tensor that broadcasts to the matrix holds for i - j = 1 - n .. n - 1."""
        shape = node.meta["val"].shape
        index = tuple(Line() if size == 1 else Line.index(dim - len(shape)) for dim, size in enumerate(shape))
        return self._tensor(self._value(node, index), node)

    def _value(self, node: Node, index: Index) -> Value:
        key = node, index
        if key not in self._known:
            self._known[key] = self._read(node, index)
        return self._known[key]

    def _read(self, node: Node, index: Index) -> Value:
        if node.target in _VIEWS:
            source = arguments(node)[0]
            there = _VIEWS[node.target](node, index)
            return None if there is None else self._value(source, there)
        if node.target in _FACTORIES:
            return self._made(node, index)
        if node.target in (aten.tril.default, aten.triu.default):
            return self._triangle(node, index)
        if node.target is aten.index.Tensor:
            return self._looked_up(node, index)
        return self._computed(node, index) if node.target in _POINTWISE else None

    def _made(self, node: Node, index: Index) -> Value:
        """Of a factory."""
        dtype = node.meta["val"].dtype
        if node.target is aten.arange.start_step:
            start, step = arguments(node)[0], argument(node, 2, "step", 1)
            whole = dtype in _INTEGERS and isinstance(start, int) and isinstance(step, int)
            return Line(start).plus(index[0], step) if whole else None
        filled = arguments(node)[1 if node.target is aten.full.default else 0]
        if isinstance(filled, Node):
            return None
        return Line(int(filled)) if dtype in _INTEGERS else self._filled(node, filled)

    def _filled(self, node: Node, filled: float) -> Tensor:
        value = node.meta["val"]
        return torch.full((2 * self._sizes[-1] - 1,) if value.dim() else (), filled, dtype=value.dtype)

    def _triangle(self, node: Node, index: Index) -> Value:
        source = arguments(node)[0]
        values = self._tensor(self._value(source, index), source)
        border = index[-2].plus(index[-1], -1).plus(Line(int(argument(node, 1, "diagonal", 0))))
        kept = self._compared(operator.ge if node.target is aten.tril.default else operator.le, border)
        return None if values is None or kept is None else torch.where(kept, values, torch.zeros_like(values))

    def _looked_up(self, node: Node, index: Index) -> Value:
        """Of a tensor that whole numbers index in all of its dims."""
        source, places = arguments(node)
        shape, there = source.meta["val"].shape, list[Line]()
        if len(places) != len(shape):
            return None
        for place, size in zip(places, shape, strict=True):
            found = self._operand(place, index) if isinstance(place, Node) else None
            if not isinstance(found, Line) or not all(0 <= end < size for end in self._ends(found)):
                return None
            there.append(found)
        return self._value(source, tuple(there))

    def _computed(self, node: Node, index: Index) -> Value:
        """Of an operator by element."""
        given = [self._operand(x, index) if isinstance(x, Node) else x for x in arguments(node)]
        if any(x is None for x in given):
            return None
        whole = [Line(x) if type(x) is int else x for x in given]
        lines = [x for x in whole if isinstance(x, Line)]
        if len(lines) == len(whole) and not node.kwargs.keys() - {"dtype", "device"}:
            found = self._of_lines(node, lines)
            if found is not None:
                return found
        operands = [self._tensor(x, a) if isinstance(a, Node) else x for x, a in zip(given, node.args, strict=True)]
        if any(x is None for x in operands):
            return None
        options = {name: value for name, value in node.kwargs.items() if name != "device"}
        if any(isinstance(value, Node) for value in options.values()):
            return None
        found = node.target(*operands, **options)  # type: ignore[operator]
        return found if found.dtype == node.meta["val"].dtype else None

    def _of_lines(self, node: Node, lines: list[Line]) -> Value:
        """Of whole numbers, where the result is one, or a comparison."""
        if node.target in _COMPARES:
            return self._compared(_COMPARES[node.target], lines[0].plus(lines[1], -1))
        if node.meta["val"].dtype not in _INTEGERS:
            return None
        if node.target is aten._to_copy.default:
            return lines[0]
        if node.target in (aten.add.Tensor, aten.sub.Tensor):
            return lines[0].plus(lines[1], 1 if node.target is aten.add.Tensor else -1)
        return Line().plus(lines[0], -1) if node.target is aten.neg.default else None

    def _compared(self, compare: Compare, difference: Line) -> Tensor | None:
        """bool: how a difference stands to 0."""
        least, most = self._ends(difference)
        found = {bool(compare(at, 0)) for at in (least, most, min(max(least, 0), most))}
        count = 2 * self._sizes[-1] - 1
        if len(found) == 1:
            return torch.full((count,), found.pop())
        values = self._by_distance(difference)
        return None if values is None else torch.as_tensor(compare(values, 0))

    def _ends(self, line: Line) -> tuple[int, int]:
        """The least and the largest value of a number."""
        spans = [factor * (self._sizes[dim] - 1) for dim, factor in line.terms]
        return line.constant + sum(min(0, span) for span in spans), line.constant + sum(max(0, span) for span in spans)

    def _by_distance(self, line: Line) -> Tensor | None:
        slope, size = line.slope, self._sizes[-1]
        return None if slope is None else slope * torch.arange(1 - size, size) + line.constant

    def _operand(self, node: Node, index: Index) -> Value:
        """The value of an operand that broadcasts to a result."""
        shape = node.meta["val"].shape
        own = index[len(index) - len(shape) :]
        return self._value(node, tuple(Line() if n == 1 else at for n, at in zip(shape, own, strict=True)))

    def _tensor(self, value: Value, node: Node) -> Tensor | None:
        """In the dtype of a node, with a dim where it has some."""
        result = node.meta["val"]
        if isinstance(value, Line):
            values = self._by_distance(value)
            value = None if values is None else values.to(result.dtype)
        if value is None:
            return None
        if result.dim():
            return value if value.dim() else value.expand(2 * self._sizes[-1] - 1)
        return value.reshape(-1)[0]  # no index to depend on


def _of_view(node: Node, index: Index) -> Index | None:
    """Dims of size 1 come and go."""
    source, result = arguments(node)[0].meta["val"].shape, node.meta["val"].shape
    if [size for size in source if size != 1] != [size for size in result if size != 1]:
        return None
    left = iter(at for size, at in zip(result, index, strict=True) if size != 1)
    return tuple(Line() if size == 1 else next(left) for size in source)


def _of_expand(node: Node, index: Index) -> Index:
    shape = arguments(node)[0].meta["val"].shape
    own = index[len(index) - len(shape) :]
    return tuple(Line() if size == 1 else at for size, at in zip(shape, own, strict=True))


def _of_permute(node: Node, index: Index) -> Index:
    order = [dim % len(index) for dim in arguments(node)[1]]
    return tuple(index[order.index(dim)] for dim in range(len(index)))


def _of_slice(node: Node, index: Index) -> Index:
    source = arguments(node)[0].meta["val"].shape
    dim = argument(node, 1, "dim", 0) % len(source)
    start, step = argument(node, 2, "start", None) or 0, argument(node, 4, "step", 1)
    first = min(max(start + source[dim] if start < 0 else start, 0), source[dim])
    return (*index[:dim], Line(first).plus(index[dim], step), *index[dim + 1 :])


def _of_select(node: Node, index: Index) -> Index:
    source = arguments(node)[0].meta["val"].shape
    dim, at = arguments(node)[1] % len(source), arguments(node)[2]
    return (*index[:dim], Line(at % source[dim]), *index[dim:])


def _as_it_is(node: Node, index: Index) -> Index:
    return index


_VIEWS: Mapping[Any, Callable[[Node, Index], Index | None]] = {
    aten.view.default: _of_view,
    aten.expand.default: _of_expand,
    aten.permute.default: _of_permute,
    aten.slice.Tensor: _of_slice,
    aten.select.int: _of_select,
    aten.clone.default: _as_it_is,
}
_FACTORIES = frozenset({aten.arange.start_step, aten.full.default, aten.scalar_tensor.default})
