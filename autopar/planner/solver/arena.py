"""Hash-consing: equal arrays get one token, and a computation on equal operands runs once.

A model repeats its layer 32 times, so the solver meets the same matrices 32 times. It therefore passes tokens
around instead of arrays; `derive` remembers (operation, operand tokens) -> result tokens. Tokens count up in
the order of first use, so everything ordered by token is the same in every process; no `id()` and no `hash()`
ever decides an order.

    arena = Arena(); arena.token(np.zeros(2)) == arena.token(np.zeros(2))      # True
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Arena:
    """The arrays of one solve, by token."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._by_content: dict[tuple[Hashable, ...], int] = {}
        self._by_identity: dict[int, tuple[int, Array]] = {}
        self._derived: dict[tuple[Hashable, ...], tuple[int, ...]] = {}

    def __getitem__(self, token: int) -> Array:
        return self._arrays[token]

    def fork(self) -> Arena:
        """Return an arena that knows all of this one, and whose additions can be thrown away."""
        fork = Arena()
        fork._arrays = list(self._arrays)
        fork._by_content, fork._by_identity = dict(self._by_content), dict(self._by_identity)
        fork._derived = dict(self._derived)
        return fork

    def token(self, array: Array) -> int:
        """Return the token of this content. The array must not change afterwards."""
        known = self._by_identity.get(id(array))
        if known is not None:
            return known[0]
        content = (array.shape, array.dtype.str, array.tobytes())
        token = self._by_content.setdefault(content, len(self._arrays))
        if token == len(self._arrays):
            self._arrays.append(np.asarray(array, order="C"))
        # The tuple keeps the array alive, so that its id cannot be given to another one.
        self._by_identity[id(array)] = (token, array)
        return token

    def derive(
        self, name: str, function: Callable[..., tuple[Array, ...]], *operands: int, key: Hashable = ()
    ) -> tuple[int, ...]:
        """Return the tokens of `function(*arrays)`; `key` is whatever else the function depends on."""
        memo = (name, key, operands)
        result = self._derived.get(memo)
        if result is None:
            arrays = function(*(self._arrays[operand] for operand in operands))
            result = self._derived[memo] = tuple(self.token(array) for array in arrays)
        return result

    def remember(self, name: str, operand: int, result: int) -> None:
        """Record that `name` of `operand` is `result` (used to keep transposition an involution)."""
        self._derived[(name, (), (operand,))] = (result,)
