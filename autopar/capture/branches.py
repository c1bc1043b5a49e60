"""Branches by values (`branches="example"`): Python reads what the example gives, and every call checks that it is so.

    if not torch.isfinite(h).all(): h = clamp(h)     the branch of the example; guard: isfinite(h).all() is True again
    if torch.rand(1).item() <= 0.1: skip             guard: the draw answers `<= 0.1` as it did
    mask = frames < int(lengths.max())               guard: lengths.max() is the same number again
    one_hot(ids, ids.max() + 1)                      guard: a number where torch takes no tensor, the same again
    edges[:, mask]                                   guard: as many of the mask are True; which ones is computed

A run on the example inputs (`example_run.py`) notes what Python reads, by place in the source and how often it came
there. The trace, in which tensors have no values, takes its answers from these notes, and returns beside the outputs
what was read, computed as everything else is: a guard. Whether the notes were right for a call is known by its guards
alone, so a program that is captured later, without weights, may take the notes of an earlier one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar._compat import (
    FakeTensor,
    FunctionalTensor,
    OpOverloadPacket,
    no_dispatch,
    tree_leaves,
    tree_map,
    value_of_constant,
)
from autopar.capture.checkpointed_regions import recomputed_within
from autopar.capture.read_numbers import ReadNumber, plain, read_number
from autopar.capture.value_checks import asking_line
from autopar.errors import CaptureError
from autopar.program import Guard

Spot: TypeAlias = tuple[str, int]
"""Who reads: "file:line (source)", and how often that line has read before in this run."""
log = logging.getLogger(__name__)

Notes: TypeAlias = Mapping[Spot, Any]
"""What was read at every spot: a bool, a number, or lists of them."""

_NEXT_STEP = (
    "build the model with its weights (not on meta), pass real example inputs to compile, and compile it in the mode "
    "(train or eval) in which this line runs"
)


@dataclass(eq=False, slots=True)
class _Read:
    """A tensor that was read without a value of its own, and what stood in for it."""

    tensor: Tensor
    place: str
    value: Any
    number: ReadNumber | None = None


class Branches(TorchFunctionMode):
    """Within the mode, values that Python reads come from the tensors that have them, else from `notes`.

    found: all that was read in this run, as notes for another one."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes
        self._visits: Counter[str] = Counter()
        self._reads: list[_Read] = []
        self._replaced = contextlib.ExitStack()
        self.found: dict[Spot, Any] = {}

    def __enter__(self) -> Branches:
        self._replaced.enter_context(recomputed_within(self._mark))
        for kind in (FunctionalTensor, FakeTensor):  # they bring their own, which no function mode sees
            self._replaced.enter_context(mock.patch.object(kind, "tolist", self._tolist))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._replaced.close()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = plain((args, dict(kwargs or {})))
        if func in _READS:
            return self._answer(func, *args)
        if func in _SHAPED:
            return _SHAPED[func](self, func, *args, **kwargs)
        if any(map(_is_scalar, tree_leaves((args, kwargs)))):
            args, kwargs = self._with_numbers(func, args, kwargs)
        return func(*args, **kwargs)

    def guards(self) -> list[tuple[Guard, Tensor]]:
        """What every call must give again, and the tensors that compute it."""
        return [(_guard(index, read), read.tensor) for index, read in enumerate(self._reads)]

    @property
    def _tolist(self) -> Callable[[Tensor], Any]:
        return lambda tensor: self._answer(Tensor.tolist, tensor)

    def _answer(self, func: Callable[..., Any], *args: Any) -> Any:
        found = self._read(_READS[func](*args))
        value = found.value if isinstance(found, _Read) else found
        if func in _CONVERSIONS:
            return _CONVERSIONS[func](value)
        if not isinstance(found, _Read) or func is not Tensor.item or isinstance(value, bool):
            return value
        found.number = read_number(value)
        return found.number

    def number(self, value: Any) -> Any:
        """The number that a 0-dim tensor holds; anything else as it is."""
        if not _is_scalar(value):
            return value
        found = self._read(value)
        return found.value if isinstance(found, _Read) else found

    def _with_numbers(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with numbers where it takes no tensor."""
        positions, names = _numbers_of(getattr(func, "__name__", ""))
        last = len(positions) - 1  # the sizes of view(*sizes) have one position
        args = tuple(
            tree_map(self.number, value) if last >= 0 and positions[min(index, last)] else value
            for index, value in enumerate(args)
        )
        return args, {
            name: tree_map(self.number, value) if name in names else value for name, value in kwargs.items()
        }

    def _read(self, tensor: Tensor) -> Any:
        """The value of a tensor; where it has none of its own the read, which becomes a guard."""
        place = asking_line(sys._getframe(1))
        spot = (place, self._visits[place])
        self._visits[place] += 1
        value = value_of_constant(tensor)
        if value is None and spot not in self._notes:
            raise CaptureError(
                f'{place} reads a value that branches="example" does not know: {tuple(tensor.shape)} of '
                f"{tensor.dtype}, computed from weights or inputs that have none here: {_NEXT_STEP}"
            )
        with no_dispatch():
            self.found[spot] = self._notes[spot] if value is None else value.tolist()
        if value is not None:
            return self.found[spot]
        self._reads.append(_Read(tensor.detach(), place, self.found[spot]))
        return self._reads[-1]

    def positions(self, mask: Tensor) -> tuple[Tensor, ...] | None:
        """Where a mask is True, one tensor per dim; None where it has values, and torch itself can say so."""
        found = self._read(mask.sum())
        if not isinstance(found, _Read):
            return None
        flat, places = mask.reshape(-1), []
        position = (~flat).to(torch.uint8).argsort(stable=True)[: found.value]
        for size in reversed(mask.shape):
            places.append(position % size)
            position = position // size
        return tuple(reversed(places))

    def _mark(self) -> Callable[[], Branches]:
        """For a checkpointed region that runs again: it reads what it read here, and guards it once."""
        visits = self._visits.copy()

        def again() -> Branches:
            replayed = Branches({**self._notes, **self.found})
            replayed._visits = visits.copy()
            return replayed

        return again


def _guard(index: int, read: _Read) -> Guard:
    asked = () if read.number is None or read.number.is_taken else tuple(read.number.asked)
    return Guard(name=f"guards/{index}", place=read.place, value=read.value, asked=asked)


def _is_true(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.bool else tensor != 0


def _are_equal(left: Tensor, right: Tensor) -> Tensor:
    return (left == right).all() if left.shape == right.shape else torch.zeros((), dtype=torch.bool)


_READS: Mapping[Any, Callable[..., Tensor]] = {
    Tensor.item: lambda x: x.reshape(()),
    Tensor.tolist: lambda x: x,
    Tensor.__bool__: lambda x: _is_true(x.reshape(())),
    Tensor.is_nonzero: lambda x: _is_true(x.reshape(())),
    torch.is_nonzero: lambda x: _is_true(x.reshape(())),
    Tensor.__int__: lambda x: x.reshape(()),
    Tensor.__index__: lambda x: x.reshape(()),
    Tensor.__float__: lambda x: x.reshape(()),
    Tensor.__contains__: lambda x, element: (x == element).any(),
    Tensor.equal: _are_equal,
    torch.equal: _are_equal,
}
"""What reads values in Python -> the tensor whose value is read."""
_CONVERSIONS: Mapping[Any, Callable[[Any], Any]] = {
    Tensor.__int__: int,
    Tensor.__index__: int,
    Tensor.__float__: float,
}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


@functools.cache
def _numbers_of(name: str) -> tuple[tuple[bool, ...], frozenset[str]]:
    """Of the arguments of an operator of torch, by position and by name, those that are a number or a list of numbers
    in every overload."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, OpOverloadPacket):
        return (), frozenset()
    takes: dict[int | str, bool] = {}
    for overload in packet.overloads():  # type: ignore[no-untyped-call]
        for index, argument in enumerate(getattr(packet, overload)._schema.arguments):
            for place in (index, argument.name):
                takes[place] = takes.get(place, True) and str(argument.type) in _NUMBERS
    positions = sorted(place for place in takes if isinstance(place, int))
    names = (place for place in takes if isinstance(place, str) and takes[place])
    return tuple(takes[place] for place in positions), frozenset(names)


_NUMBERS = frozenset(
    form.format(kind) for kind in ("int", "SymInt", "float", "number") for form in ("{}", "Optional[{}]", "List[{}]")
)
"""The types of a schema in which a number stands."""


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool and part.dim() > 0


def _key(mode: Branches, key: Any) -> Any:
    """An index with numbers in place of the masks whose values are not known, and of tensors that bound a slice."""
    if not any(_is_mask(part) or isinstance(part, slice) for part in (key if isinstance(key, tuple) else (key,))):
        return key
    parts: list[Any] = []
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, slice):
            parts.append(slice(*map(mode.number, (part.start, part.stop, part.step))))
            continue
        places = mode.positions(part) if _is_mask(part) else None
        parts.extend([part] if places is None else places)
    return tuple(parts)


def _getitem(mode: Branches, func: Callable[..., Any], x: Tensor, key: Any) -> Any:
    return func(x, _key(mode, key))


def _setitem(mode: Branches, func: Callable[..., Any], x: Tensor, key: Any, value: Any) -> Any:
    """What has one value for every position needs no positions; a row for each needs as many as there were."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return func(x, key, value)
    if _is_mask(key) and value.dim() <= x.dim() - key.dim():
        mask = key.reshape(*key.shape, *(1,) * (x.dim() - key.dim()))
        return x.copy_(torch.where(mask, value.to(x.dtype), x))
    return func(x, _key(mode, key), value)


def _nonzero(mode: Branches, func: Callable[..., Any], x: Tensor, *, as_tuple: bool = False) -> Any:
    places = mode.positions(_is_true(x))
    if places is None:
        return func(x, as_tuple=True) if as_tuple else func(x)
    return places if as_tuple else torch.stack(places, dim=1)


def _where(mode: Branches, func: Callable[..., Any], condition: Tensor, *choices: Any, **named: Any) -> Any:
    places = None if choices or named else mode.positions(_is_true(condition))
    return func(condition, *choices, **named) if places is None else places


def _one_hot(mode: Branches, func: Callable[..., Any], x: Tensor, num_classes: Any = -1) -> Any:
    count = mode.number(num_classes)
    return func(x, mode.number(x.max()) + 1 if count == -1 else count)


_SHAPED: Mapping[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.nonzero: _nonzero,
    torch.nonzero: _nonzero,
    torch.argwhere: _nonzero,
    Tensor.argwhere: _nonzero,
    torch.where: _where,
    functional.one_hot: _one_hot,
}
"""What has a shape that depends on values -> the same with the shape that the example had."""


def check_draws(guards: Sequence[Guard]) -> None:
    """Say in the log where random draws decide. Raises CaptureError for one that went on as a number: no call would
    draw it again."""
    drawn = [guard for guard in guards if guard.is_drawn]
    for place in dict.fromkeys(guard.place for guard in drawn):
        log.warning("a random draw decides at %s: a call in which it decides otherwise raises", place)
    for guard in drawn:
        if not guard.asked and not isinstance(guard.value, bool):
            raise CaptureError(
                f'{guard.place} reads a random number into Python: branches="example" keeps what the example drew, and '
                "no call draws that again: draw with torch and choose with torch.where, or set what draws here to 0"
            )
