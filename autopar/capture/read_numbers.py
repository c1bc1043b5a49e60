"""A number that was read from a tensor, which remembers what it was used for.

    p = tensor.item()       a ReadNumber
    if p <= 0.1: ...        asked: (le, 0.1) was answered True; every call must answer so again
    p * 2, range(p), f(p)   taken: the value itself went somewhere, so every call must give it again

It passes for an int or a float (`isinstance`), but is none, so that nothing reads it unseen: what is not written in
Python calls `__float__` or `__index__`, and torch's functions get the plain number from the mode of `branches.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from autopar._compat import tree_leaves, tree_map
from autopar.program import Asked

_COMPARISONS = ("lt", "le", "eq", "ne", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow")
_BITS = ("and", "or", "xor", "lshift", "rshift")
_ALONE = ("neg", "pos", "abs", "invert", "int", "float", "index", "complex", "trunc", "floor", "ceil", "round")
_TEXTS = ("hash", "repr", "str", "format")


class ReadNumber:
    """See the module docstring. asked: its comparisons; is_taken: whether its value was used otherwise."""

    __slots__ = ("_value", "asked", "is_taken")

    def __init__(self, value: int | float) -> None:
        self._value = value
        self.asked: list[Asked] = []
        self.is_taken = False

    @property
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


def plain(value: Any) -> Any:
    """A structure with the numbers themselves in place of what was read."""
    if any(type(leaf) is ReadNumber for leaf in tree_leaves(value)):
        return tree_map(lambda leaf: leaf.take() if type(leaf) is ReadNumber else leaf, value)
    return value


def _comparison(how: str) -> Callable[[ReadNumber, Any], Any]:
    return lambda number, other: number.compared(how, plain(other))


def _use(name: str) -> Callable[..., Any]:
    return lambda number, *others: getattr(number.take(), name)(*map(plain, others))


for _how in _COMPARISONS:
    setattr(ReadNumber, f"__{_how}__", _comparison(_how))
for _name in (*_ARITHMETIC, *_BITS, *(f"r{name}" for name in (*_ARITHMETIC, *_BITS)), *_ALONE, *_TEXTS):
    setattr(ReadNumber, f"__{_name}__", _use(f"__{_name}__"))
