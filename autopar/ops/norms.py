"""Norms of whole rows as one operator each, with the addition of the residual in front of them.

    total = x + residual; y = total * rsqrt(mean(total^2) + eps) * weight
        -->   y, total, rstd = autopar::add_rms_norm(x, residual, weight, eps)

Backward needs the row and its statistics only, so nothing else is saved; `added` is a further gradient of the row (the
residual's), added in the same pass. The bodies here are the reference: they run on CPUs, and wherever the registry
(`runtime/kernels/registry.py`) has no Triton kernel for the arguments.

Rows may follow each other in another order than that of the dims, as heads of a projection do; results have that of x.
Shapes: x (..., D), vectors (D), statistics (..., 1) in fp32 (fp64 for fp64). Gradients of the vectors are wide, too:
they are sums over all rows, and their master copies are fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.ops import rows

LAST = (-1,)
LARGEST_ROW = 8192
"""Elements of a row that the Triton kernels hold in registers: more spill (benchmarks/results/kernels.json)."""


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(out, rstd): the rows of `x` divided by the root of their mean square, rounded to its dtype, times `weight`."""
    out, rstd = rows.rms_norm_block(x, weight, rows.row_squares(x, None, LAST, 1), x.shape[-1], eps, True)
    return out, _in_order(x, rstd)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(out, x + residual, rstd), normalised after the addition is rounded to the dtype of x."""
    total = x + residual
    out, rstd = rms_norm_reference(total, weight, eps)
    return out, total, rstd


def rms_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(gradient of the row, gradient of weight); `added` is added to the former."""
    gradients = _gradients(grad, x, weight, None, rstd, added)
    return gradients[0], gradients[1]


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(out, mean, rstd): the rows of `x` less their mean, divided by their deviation, times `weight`, plus `bias`."""
    width = x.shape[-1]
    sums = rows.row_sums(x, LAST)
    squares = rows.row_squares(x, sums, LAST, width)
    out, mean, rstd = rows.layer_norm_block(x, weight, bias, sums, squares, width, eps)
    return out, _in_order(x, mean), _in_order(x, rstd)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, x + residual, mean, rstd)."""
    total = x + residual
    out, mean, rstd = layer_norm_reference(total, weight, bias, eps)
    return out, total, mean, rstd


def layer_norm_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the row, of weight, of bias); `added` is added to the first."""
    gradients = _gradients(grad, x, weight, mean, rstd, added)
    return gradients[0], gradients[1], gradients[2]


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, added: Tensor | None
) -> tuple[Tensor, ...]:
    sums = rows.norm_gradient_sums(grad, x, mean, rstd, weight, (x.dim() - 1,))
    row, *vectors = gradient_block(grad, x, weight, mean, rstd, added, sums, x.shape[-1])
    return _as(_block(x), row), *vectors


def gradient_block(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    added: Tensor | None,
    sums: Tensor,
    count: int,
) -> tuple[Tensor, ...]:
    """(gradient of a block of rows, of weight[, of bias]), the latter summed over its rows in fp32; `sums` are those of
    `norm_gradient_sums` over whole rows of `count` elements."""
    wide, last = _wide(x), (x.dim() - 1,)
    vectors = 1 if mean is None else 2
    row, *summed = rows.norm_gradients(
        grad.to(wide), x.to(wide), mean, rstd, weight.to(wide), sums, count, last, vectors
    )
    return ((row if added is None else row + added.to(wide)).to(x.dtype), *summed)


def _statistics(x: Tensor) -> Tensor:
    return torch.empty_like(x[..., :1], dtype=_wide(x))


def _in_order(x: Tensor, statistic: Tensor) -> Tensor:
    """A number per row, in the order of the rows."""
    return _as(_statistics(x), statistic)


def _as(wanted: Tensor, value: Tensor) -> Tensor:
    """A value in the order in memory that another has."""
    return value if value.stride() == wanted.stride() else wanted.copy_(value)


def _vector(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[-1],), dtype=_wide(x))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _block(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def order_in_memory(x: Tensor) -> list[int]:
    """The dims of x, the last one behind the others, in the order in which rows follow each other in memory."""
    return [*sorted(range(x.dim() - 1), key=x.stride, reverse=True), x.dim() - 1]


def row_count(x: Tensor) -> int:
    """Rows of x (..., D)."""
    return math.prod(x.shape[:-1])


rms_norm = torch.library.custom_op(
    "autopar::rms_norm",
    rms_norm_reference,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
)
add_rms_norm = torch.library.custom_op(
    "autopar::add_rms_norm",
    add_rms_norm_reference,
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
)
rms_norm_backward = torch.library.custom_op(
    "autopar::rms_norm_backward",
    rms_norm_backward_reference,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor rstd, Tensor? added) -> (Tensor, Tensor)",
)
layer_norm = torch.library.custom_op(
    "autopar::layer_norm",
    layer_norm_reference,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
)
add_layer_norm = torch.library.custom_op(
    "autopar::add_layer_norm",
    add_layer_norm_reference,
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
)
layer_norm_backward = torch.library.custom_op(
    "autopar::layer_norm_backward",
    layer_norm_backward_reference,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? added)"
    " -> (Tensor, Tensor, Tensor)",
)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _block(x), _statistics(x)


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _block(x), _block(x), _statistics(x)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    return _block(x), _vector(x)


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _block(x), _statistics(x), _statistics(x)


@add_layer_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _block(x), _block(x), _statistics(x), _statistics(x)


@layer_norm_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, added: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _block(x), _vector(x), _vector(x)
