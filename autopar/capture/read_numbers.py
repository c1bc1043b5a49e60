"""A number that was read from a tensor, which remembers what it was used for.

    p = tensor.item()       a ReadNumber
    if p <= 0.1: ...        asked: (le, 0.1) was answered True; every call must answer so again
    p * 2, range(p), f(p)   taken: the value itself went somewhere, so every call must give it again

It passes for an int or a float (`isinstance`), but is none, so that nothing reads it unseen: what is not written in
Python calls `__float__` or `__index__`. Torch takes it as one of its symbolic numbers, up to the mode of `branches.py`,
which hands on the plain one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from autopar._compat import tree_leaves, tree_map
from autopar.program import Asked

_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
_ALONE = ("neg", "pos", "abs", "invert", "int", "float", "index", "complex", "trunc", "floor", "ceil", "round")
_OTHERS = ("divmod", "hash", "repr", "str", "format")


class ReadNumber:
    """See the module docstring. asked: its comparisons; is_taken: whether its value was used otherwise."""

    def __init__(self, value: int | float) -> None:
        self._value = value
        self.asked: list[Asked] = []
        self.is_taken = False

    @property  # type: ignore[misc]  # of `object` it can be assigned
    def __class__(self) -> Any:
        """That of the number: `isinstance(x, float)` holds."""
        return type(self._value)

    def take(self) -> int | float:
        """The value, for a use that is no comparison."""
        self.is_taken = True
        return self._value

    def compared(self, how: str, other: Any) -> Any:
        """The answer of a comparison, which is remembered where the other side is a number."""
        compare = getattr(operator, how)
        if type(other) not in (bool, int, float):
            return compare(self.take(), other)
        answer = compare(self._value, other)
        self.asked.append(Asked(how, other, answer))
        return answer

    def __bool__(self) -> bool:
        return bool(self.compared("ne", 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.take(), name)


class ReadInt(ReadNumber, torch.SymInt):
    """A whole one."""


class ReadFloat(ReadNumber, torch.SymFloat):
    """A floating one."""


def read_number(value: int | float) -> ReadNumber:
    """A value that was read, of its kind."""
    return ReadInt(value) if isinstance(value, int) else ReadFloat(value)


def plain(value: Any) -> Any:
    """A structure with the numbers themselves in place of what was read."""
    if any(isinstance(leaf, ReadNumber) for leaf in tree_leaves(value)):
        return tree_map(lambda leaf: leaf.take() if isinstance(leaf, ReadNumber) else leaf, value)
    return value


def _comparison(how: str) -> Callable[[ReadNumber, Any], Any]:
    return lambda number, other: number.compared(how, plain(other))


def _left(name: str) -> Callable[[ReadNumber, Any], Any]:
    return lambda number, other: getattr(operator, name)(number.take(), plain(other))


def _right(name: str) -> Callable[[ReadNumber, Any], Any]:
    return lambda number, other: getattr(operator, name)(plain(other), number.take())


def _use(name: str) -> Callable[..., Any]:
    return lambda number, *others: getattr(number.take(), name)(*map(plain, others))


for _how in _COMPARISONS:
    setattr(ReadNumber, f"__{_how}__", _comparison(_how))
for _name in _BINARY:
    setattr(ReadNumber, f"__{_name.rstrip('_')}__", _left(_name))
    setattr(ReadNumber, f"__r{_name.rstrip('_')}__", _right(_name))
for _name in (*_ALONE, *_OTHERS):
    setattr(ReadNumber, f"__{_name}__", _use(f"__{_name}__"))
