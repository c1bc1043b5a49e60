"""Registers the CUDA implementations of our operators: the Triton kernel, or the torch reference without Triton."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import torch
from torch import Tensor

from autopar.ops.dropout import dropout_rows, dropout_rows_reference


class RowDropout(Protocol):
    """The signature of `dropout_rows_reference`."""

    def __call__(
        self, x: Tensor, p: float, seed: Tensor, salt: int, first: int, row_stride: int, rows: int
    ) -> tuple[Tensor, Tensor]: ...


@cache
def row_dropout() -> RowDropout:
    """The Triton kernel where Triton is installed, else the reference."""
    if find_spec("triton") is None:
        return dropout_rows_reference
    return cast(RowDropout, import_module("autopar.runtime.kernels.dropout").dropout_rows)


@dropout_rows.register_kernel("cuda")
def _(x: Tensor, p: float, seed: Tensor, salt: int, first: int, row_stride: int, rows: int) -> tuple[Tensor, Tensor]:
    with torch.cuda.device(x.device):
        return row_dropout()(x, p, seed, salt, first, row_stride, rows)
