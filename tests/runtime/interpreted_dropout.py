"""The Triton dropout in Triton's interpreter beside the torch reference (`tests.runtime.interpreted` runs it)."""

from __future__ import annotations

import torch

from autopar.ops.dropout_operator import dropout_rows_reference
from autopar.runtime.kernels.triton_dropout import dropout_rows

# (rows, columns, first, row_stride): aligned and not, one row, more than a tile, numbers beyond 2**32
BLOCKS = [
    (1, 64, 0, 64),
    (1, 5000, 3, 5000),
    (5, 16, 32, 64),
    (7, 13, 5, 29),
    (3, 1, 2, 7),
    (2, 2100, (1 << 33) + 1, 4099),
]
SALTS = (0, 1, 77, (1 << 31) + 5)


def compare(shift: int) -> int:
    """How many blocks agree; raises AssertionError where one does not. shift: moves the first number that the kernel
    is told, a fault that the comparison must see."""
    count = 0
    for seed in (torch.tensor(1), torch.tensor(-(1 << 40) - 7)):
        for rows, columns, first, row_stride in BLOCKS:
            for salt, p, dtype in zip(SALTS, (0.1, 0.5, 1.0, 0.0), (torch.float32, torch.bfloat16) * 2, strict=True):
                x = torch.randn(rows, columns, dtype=dtype)
                out, mask = dropout_rows(x, p, seed, salt, first + shift, row_stride, rows)
                expected, kept = dropout_rows_reference(x, p, seed, salt, first, row_stride, rows)
                assert torch.equal(mask, kept), (rows, columns, first, salt, p)
                torch.testing.assert_close(out, expected)
                count += 1
    return count
