"""What a model computed on the rows that chose one expert, and the same for the rows of all experts at once.

    expert 0:  linear(x[rows 0], W0) * w[rows 0]   }
    expert 1:  linear(x[rows 1], W1) * w[rows 1]   }  -->  expert_linear(x of pairs, stack(W0, W1), ids) * w of pairs

A `Row` is the formula of a value: the function that made it and its arguments, down to tensors that are no rows.
Formulas of all experts that differ in parameters only are evaluated once, on one row per pair (token, choice).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autopar._compat import tree_flatten, tree_unflatten


class Unlike(Exception):
    """The formulas of two experts differ in more than their parameters; the text says where."""


@dataclass(frozen=True, eq=False)
class ExpertChoice:
    """Which expert each pair chose. ids: int64, any shape: its dims are the axes of the pairs; negative: none.
    known: whether the model chose them by top-k, a maximum or one-hot; distinct: no expert twice along the last dim."""

    ids: Tensor
    known: bool = False
    distinct: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the ids: one entry per token and choice."""
        return tuple(self.ids.shape)


@dataclass(frozen=True, eq=False)
class Position:
    """Where the pairs that chose `expert` stand along one axis of the pairs, or along several, as a bool mask says."""

    choice: ExpertChoice
    expert: int
    axes: tuple[int, ...]
    merged: bool = False  # the axes are one dim

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(self.choice.shape[axis] for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims that the position stands for."""
        return (math.prod(self.sizes),) if self.merged else self.sizes


@dataclass(frozen=True, eq=False)
class Row:
    """A value with one row per pair: `function(*args, **kwargs)`, where arguments may be rows themselves."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    item: int | None = None  # which element of a result that is a tuple


@dataclass(frozen=True, eq=False)
class SelectedMatrix:
    """Matrix `expert` of a tensor that holds one per expert; `origin`: equal for equal sources; turned: transposed."""

    source: Tensor
    origin: tuple[Any, ...]
    expert: int
    turned: bool = False


@dataclass(frozen=True, eq=False)
class _PerExpert:
    """One tensor per expert, stacked; `turned`: the last two dims are exchanged."""

    stack: Tensor
    turned: bool = False


_OUT_OF_PLACE: Mapping[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__iadd__: torch.add,
    Tensor.__isub__: torch.sub,
    Tensor.__imul__: torch.mul,
    Tensor.__itruediv__: torch.div,
    Tensor.add_: torch.add,
    Tensor.sub_: torch.sub,
    Tensor.mul_: torch.mul,
    Tensor.div_: torch.div,
    Tensor.relu_: torch.relu,
    functional.relu_: torch.relu,
}
_LINEAR = (functional.linear,)
_MATMUL = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_BROADCAST = {"add", "sub", "mul", "div", "true_divide", "multiply", "__add__", "__radd__", "__sub__", "__mul__"}
_BROADCAST |= {"__rmul__", "__truediv__", "__iadd__", "__imul__", "__isub__", "add_", "mul_", "sub_", "div_"}


class AllExperts:
    """Evaluates formulas on the rows of all pairs, which are ordered by the axes `leading`, then by the others."""

    def __init__(self, choice: ExpertChoice, experts: Sequence[int], leading: tuple[int, ...]) -> None:
        self.choice, self.experts, self._first = choice, list(experts), experts[0]
        if self.experts != list(range(self._first, self._first + len(experts))):
            raise Unlike(f"experts {self.experts} do not follow each other")
        self.leading = tuple(choice.shape[axis] for axis in leading)
        self.axes = [*leading, *(axis for axis in range(len(choice.shape)) if axis not in leading)]
        self.shape = tuple(choice.shape[axis] for axis in self.axes)
        ids = choice.ids.permute(self.axes).reshape(-1)
        self.ids = ids - self._first if self._first else ids
        self._values: dict[int, Any] = {}

    def value(self, formulas: Sequence[Any]) -> Any:
        """The value on all rows, from one formula (or other argument) per expert. Raises Unlike."""
        first = formulas[0]
        if isinstance(first, Row):
            if id(first) not in self._values:
                self._values[id(first)] = self._row(formulas)
            return self._values[id(first)]
        if isinstance(first, SelectedMatrix):
            return self._selected(formulas)
        if all(formula is first for formula in formulas):
            return first
        if isinstance(first, Tensor):
            return self._stacked(formulas)
        if isinstance(first, tuple | list | dict | slice):
            return self._nested(formulas)
        if any(type(formula) is not type(first) or formula != first for formula in formulas):
            raise Unlike(f"{first!r} and {next(f for f in formulas if f is not first)!r}")
        return first

    def weighted_sum(self, rows: Tensor) -> Tensor:
        """(sizes of the leading axes, ...): the sum over the other axes of the rows that chose an expert."""
        kept = rows.masked_fill(~self._valid().reshape(-1, *(1,) * (rows.dim() - 1)), 0)
        return self._by_leading(kept).sum(len(self.leading))

    def chosen(self) -> Tensor:
        """(sizes of the leading axes): whether any pair there chose one of the experts."""
        return self._by_leading(self._valid()).any(len(self.leading))

    def _valid(self) -> Tensor:
        return (self.ids >= 0) & (self.ids < len(self.experts))

    def _by_leading(self, rows: Tensor) -> Tensor:
        return rows.reshape(*self.leading, -1, *rows.shape[1:])

    def _row(self, formulas: Sequence[Row]) -> Any:
        first = formulas[0]
        same = all(isinstance(f, Row) and f.function == first.function and f.item == first.item for f in formulas)
        if not same:
            raise Unlike(f"{getattr(first.function, '__name__', first.function)} is not called for every expert")
        if first.function == Tensor.__getitem__ and _positions(first.args[1]):
            return self._picked([f.args[0] for f in formulas], [f.args[1] for f in formulas])
        if first.item is not None:
            result = self.value([f.args[0] for f in formulas])
            return result[first.item]
        args = [self.value(values) for values in zip(*(f.args for f in formulas), strict=True)]
        kwargs = {name: self.value([f.kwargs[name] for f in formulas]) for name in first.kwargs}
        return self._call(first.function, args, kwargs)

    def _call(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        function = _OUT_OF_PLACE.get(function, function)
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        own = [value for value in (*args, *kwargs.values()) if isinstance(value, _PerExpert)]
        if not own:
            return function(*args, **kwargs)
        if function in _LINEAR:
            return self._linear(*args, **kwargs)
        if function in _MATMUL and isinstance(args[1], _PerExpert):
            return self._product(args[0], args[1].stack, args[1].turned)
        if function is torch.addmm and isinstance(args[2], _PerExpert):
            out = self._product(args[1], args[2].stack, args[2].turned)
            return out + self._looked_up(args[0], out.dim())
        if function is functional.layer_norm:
            return self._layer_norm(*args, **kwargs)
        if function.__name__ in _BROADCAST:
            rank = max(value.dim() for value in args if isinstance(value, Tensor))
            return function(*(self._looked_up(value, rank) for value in args), **kwargs)
        raise Unlike(f"{function.__name__} with parameters of one expert")

    def _linear(self, rows: Tensor, weight: Any, bias: Any = None) -> Tensor:
        if not isinstance(weight, _PerExpert):
            out = functional.linear(rows, weight)
        else:
            out = self._product(rows, weight.stack, not weight.turned)
        return out if bias is None else out + self._looked_up(bias, out.dim())

    def _product(self, rows: Tensor, stack: Tensor, transposed: bool) -> Tensor:
        if rows.dim() != 2 or stack.dim() != 3:
            raise Unlike(f"a product of {tuple(rows.shape)} with {tuple(stack.shape[1:])}")
        out: Tensor = torch.ops.autopar.expert_linear(rows, stack, self.ids, transposed)
        return out

    def _layer_norm(self, rows: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        out = functional.layer_norm(rows, shape, None, None, eps)
        out = out if weight is None else out * self._looked_up(weight, out.dim())
        return out if bias is None else out + self._looked_up(bias, out.dim())

    def _looked_up(self, value: Any, rank: int) -> Any:
        """Per row the tensor of its expert, shaped to broadcast against rows with `rank` dims."""
        if not isinstance(value, _PerExpert):
            return value
        stack = value.stack.transpose(-1, -2) if value.turned else value.stack
        ids = self.ids.clamp(0, len(self.experts) - 1)
        rows = functional.embedding(ids, stack.reshape(len(self.experts), -1))
        shape = stack.shape[1:]
        return rows.reshape(-1, *(1,) * (rank - 1 - len(shape)), *shape)

    def _selected(self, formulas: Sequence[Any]) -> _PerExpert:
        first = formulas[0]
        if any(
            not isinstance(f, SelectedMatrix) or f.origin != first.origin or f.turned != first.turned for f in formulas
        ):
            raise Unlike("matrices of different tensors")
        if [f.expert for f in formulas] == list(range(first.source.shape[0])):
            return _PerExpert(first.source, first.turned)
        picked = torch.stack([first.source[f.expert] for f in formulas])
        return _PerExpert(picked, first.turned)

    def _stacked(self, formulas: Sequence[Any]) -> _PerExpert:
        first = formulas[0]
        if any(not isinstance(f, Tensor) or f.shape != first.shape or f.dtype != first.dtype for f in formulas):
            raise Unlike("parameters of different shapes or dtypes")
        return _PerExpert(torch.stack(list(formulas)))

    def _nested(self, formulas: Sequence[Any]) -> Any:
        parts = [_flat(formula) for formula in formulas]
        if any(spec != parts[0][1] for _, spec in parts):
            raise Unlike("arguments of different structure")
        leaves = [self.value(values) for values in zip(*(leaves for leaves, _ in parts), strict=True)]
        return slice(*leaves) if isinstance(formulas[0], slice) else tree_unflatten(leaves, parts[0][1])

    def _picked(self, sources: Sequence[Any], keys: Sequence[Any]) -> Tensor:
        """`source[key]` where the key says which rows: every pair gets its row, without any gather of rows."""
        source = self.value(sources)
        if not isinstance(source, Tensor):
            raise Unlike("rows of a tensor that differs between experts")
        key = _as_tuple(keys[0])
        if any(part.choice is not self.choice for part in _positions(key)):
            raise Unlike("rows that two different masks choose")
        lead = next(at for at, part in enumerate(key) if isinstance(part, Position))
        end = lead + len(_positions(key))
        axes = [axis for part in _positions(key) for axis in part.axes]
        rows = self._columns(self._per_pair(self._fitted(source, _positions(key)[0], axes), axes), key[end:], keys, end)
        return rows[(None,) * lead] if lead else rows

    def _per_pair(self, source: Tensor, axes: Sequence[int]) -> Tensor:
        """(pairs, ...) from a tensor whose first dims are the axes `axes` of the pairs."""
        order = sorted(range(len(axes)), key=lambda at: self.axes.index(axes[at]))
        source = source.permute(*order, *range(len(axes), source.dim()))
        for at, axis in enumerate(self.axes):
            source = source if axis in axes else source.unsqueeze(at)
        rest = source.shape[len(self.shape) :]
        return source.expand(*self.shape, *rest).reshape(-1, *rest)

    def _columns(self, rows: Tensor, rest: tuple[Any, ...], keys: Sequence[Any], at: int) -> Tensor:
        """What follows the positions in a key: None, full slices, or the number of the expert as a column."""
        columns = [_as_tuple(key)[at] for key in keys] if rest else []
        if columns and columns == self.experts and len(set(columns)) > 1:
            ids = (self.ids + self._first).clamp(0, rows.shape[1] - 1).reshape(-1, *(1,) * (rows.dim() - 1))
            rows, rest = rows.gather(1, ids.expand(-1, 1, *rows.shape[2:])).squeeze(1), rest[1:]
        elif any(column != columns[0] for column in columns):
            raise Unlike(f"columns {columns}")
        return rows[(slice(None), *rest)] if rest else rows

    def _fitted(self, source: Tensor, first: Position, axes: Sequence[int]) -> Tensor:
        """The part of the source that positions along the axes reach, with one dim per axis."""
        if first.merged and (len(axes) > len(first.axes) or source.shape[0] != first.shape[0]):
            raise Unlike(f"rows of {tuple(source.shape)}, of which {self.choice.shape} are chosen")
        if first.merged:
            return source.reshape(*first.sizes, *source.shape[1:])
        for dim, axis in enumerate(axes):
            size = self.choice.shape[axis]
            if source.shape[dim] < size or len(set(axes)) < len(axes):
                raise Unlike(f"rows of {tuple(source.shape)}, of which {self.choice.shape} are chosen")
            source = source.narrow(dim, 0, size) if source.shape[dim] > size else source
        return source


def _as_tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _positions(key: Any) -> list[Position]:
    return [part for part in _as_tuple(key) if isinstance(part, Position)]


def _flat(value: Any) -> tuple[list[Any], Any]:
    if isinstance(value, slice):
        return [value.start, value.stop, value.step], slice
    return tree_flatten(value)
