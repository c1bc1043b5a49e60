"""Growing arrays: rows that come in blocks, without copying all of them every time."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

Scalar = TypeVar("Scalar", bound=np.generic)

_START = 256


class Growing(Generic[Scalar]):
    """An array of rows of one shape, to which blocks of rows are appended."""

    def __init__(self, row_shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self._rows: NDArray[Any] = np.empty((_START, *row_shape), dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> NDArray[Scalar]:
        """All rows so far."""
        return self._rows[: self._count]

    def append(self, block: NDArray[Scalar]) -> None:
        """Put the rows of a block behind those that are there."""
        count = self._count + len(block)
        if count > len(self._rows):
            larger = np.empty((max(count, 2 * len(self._rows)), *self._rows.shape[1:]), self._rows.dtype)
            larger[: self._count] = self.rows
            self._rows = larger
        self._rows[self._count : count] = block
        self._count = count
