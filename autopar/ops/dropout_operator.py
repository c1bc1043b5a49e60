"""Dropout as one operator with its own call-site number (`salt`).

Capture replaces `torch.nn.functional.dropout` by `autopar::dropout`; the compiled program calls `dropout_by_index`
with the step's seed. Outside a compiled program the operator draws from torch's initial seed: the same call gives the
same mask, another salt another mask. On CUDA a block that lies in rows goes through `autopar::dropout_rows`, for which
the runtime has a Triton kernel (`runtime/kernels/triton_dropout.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.random_index import Runs, as_rows, drop_threshold, full_runs, keep_mask, reference_seed, row_words


def dropout_by_index(
    x: Tensor, p: float, seed: Tensor, salt: int, runs: Runs, shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(x / (1 - p) where kept else 0, bool mask) of the local block `x` of a tensor of global `shape`.

    runs: per dim, the runs of global indices that `x` holds (`layout.local_runs`); seed: 0-dim int64 tensor.
    """
    rows = as_rows(shape, runs) if x.is_cuda and x.dtype != torch.float64 else None
    if rows is not None:
        out, kept = dropout_rows(x, p, seed, salt, *rows)
        return out, kept
    mask = keep_mask(shape, p, seed, salt, runs)
    return _scale_kept(x, mask, p), mask


def dropout_rows_reference(
    x: Tensor, p: float, seed: Tensor, salt: int, first: int, row_stride: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Dropout of a block that lies in rows: element c of row r has the number first + r * row_stride + c."""
    columns = x.numel() // max(rows, 1)
    starts = first + row_stride * torch.arange(rows, device=x.device)
    mask = (row_words(starts, columns, seed, salt) >= drop_threshold(p)).reshape(x.shape)
    return _scale_kept(x, mask, p), mask


dropout_rows = torch.library.custom_op(
    "autopar::dropout_rows",
    dropout_rows_reference,
    mutates_args=(),
    schema="(Tensor x, float p, Tensor seed, int salt, int first, int row_stride, int rows) -> (Tensor, Tensor)",
)


@dropout_rows.register_fake
def _(x: Tensor, p: float, seed: Tensor, salt: int, first: int, row_stride: int, rows: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


@torch.library.custom_op(
    "autopar::dropout", mutates_args=(), schema="(Tensor x, float p, int salt) -> (Tensor, Tensor)"
)
def dropout(x: Tensor, p: float, salt: int) -> tuple[Tensor, Tensor]:
    """(output, bool mask), drawn by element index from torch's initial seed."""
    return dropout_by_index(x, p, reference_seed(x.device), salt, full_runs(x.shape), x.shape)


@dropout.register_fake
def _(x: Tensor, p: float, salt: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


@torch.library.custom_op(
    "autopar::dropout_backward", mutates_args=(), schema="(Tensor grad, Tensor mask, float p) -> Tensor"
)
def dropout_backward(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient of the input: `grad` / (1 - p) where kept. Elementwise, so it runs on local blocks as it is."""
    return _scale_kept(grad, mask, p)


@dropout_backward.register_fake
def _(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    return grad.new_empty(grad.shape)


def _scale_kept(x: Tensor, mask: Tensor, p: float) -> Tensor:
    scale = 0.0 if p >= 1.0 else 1.0 / (1.0 - p)
    return (x * mask * scale).contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.p = inputs[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    (mask,) = ctx.saved_tensors
    return dropout_backward(grad, mask, ctx.p), None, None


dropout.register_autograd(_backward, setup_context=_save)
