"""An MLP in tiles of rows: its hidden activations never exist whole.

    hidden = silu(x @ gate.t()) * (x @ up.t()); out = hidden @ down.t()
        -->   out = tiled_mlp(x, (gate, up), (), down, "silu", False)
    its backward: six products, and what stands between them
        -->   grad_x, grad_gate, grad_up, grad_down = tiled_mlp_backward(grad, x, (gate, up), (), down, "silu", False)

One weight in front of the activation is a plain MLP, two are a gated one (`ops/gated.py`). Backward computes the hidden
activations of a tile again, so that x alone is kept for it. Gradients of weights are added up over tiles in fp32 where
weights are narrower, in totals beside the results, and rounded once: sums in bf16 would lose small parts. A bias behind
the last product, and dropout there, are no part of it.

x (N, K); weights (F, K) and down (O, F) as nn.Linear has them, or with `columns` (K, F) and (F, O) as GPT-2's Conv1D;
biases (F), one for each of `weights` or none. A rank may hold a block of F: `out` and the gradient of x are then its
summand. Source: TiledMLP of Arctic Long Sequence Training (arXiv 2506.13996), whose tiles have about K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from autopar.ops.gated import gated, gated_backward
from autopar.ops.linear_cross_entropy import equal_chunks

LEAST_ROWS = 4096
"""Of a tile. With fewer, adding up bf16 gradients of the weights of a gated MLP (30 F K bytes a tile) takes more than
an eighth of the seconds of backward's eight products (16 rows F K operations), at 3.35 TB/s and 989 TFLOP/s (H100-SXM).
A hidden tensor of a tile of Llama-3-8B has 117 MB in bf16, and backward holds five of them beside totals of 705 MB."""
_aten = torch.ops.aten


def tile_rows(rows: int, width: int) -> int:
    """Rows of a tile of x (rows, width); tiles are equal but for the last one.

        tile_rows(131072, 4096) = 4096     tile_rows(131072, 8192) = 8192     tile_rows(5000, 512) = 2560
    """
    return equal_chunks(rows, most_rows(width))


def most_rows(width: int) -> int:
    """Of a tile: as many as the width, with which the hidden tensors of a tile take about as much as the totals of
    gradients, but at least `LEAST_ROWS`."""
    return max(LEAST_ROWS, width)


def tiled_mlp_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], down: Tensor, activation: str, columns: bool
) -> Tensor:
    """(N, O): the MLP without the bias behind it."""
    out = x.new_empty(x.shape[0], down.shape[1 if columns else 0])
    for rows in _tiles(x):
        hidden = _activated(_inputs(x[rows], weights, biases, columns), activation)
        torch.mm(hidden, _turned(down, not columns), out=out[rows])
        del hidden  # in front of the next tile's
    return out


def tiled_mlp_backward_reference(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    down: Tensor,
    activation: str,
    columns: bool,
) -> list[Tensor]:
    """Gradients of x, of `weights`, of `biases`, of `down`, in their dtypes."""
    grad_x, parameters = x.new_empty(x.shape), [*weights, *biases, down]
    found = [one.new_empty(one.shape) for one in parameters]
    add_themselves = x.dtype.itemsize >= 4 or tile_rows(*x.shape) >= len(x)
    totals = found if add_themselves else [one.new_empty(one.shape, dtype=torch.float32) for one in parameters]
    for rows in _tiles(x):
        add = [partial(_add, total, one, rows.start == 0) for total, one in zip(totals, found, strict=True)]
        _backward_of_tile(grad[rows], x[rows], grad_x[rows], add, weights, biases, down, activation, columns)
    for one, total in zip(found, totals, strict=True):
        if one is not total:
            one.copy_(total)
    return [grad_x, *found]


def _backward_of_tile(
    grad: Tensor,
    x: Tensor,
    grad_x: Tensor,
    add: Sequence[Callable[[Tensor, Tensor | None], None]],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    down: Tensor,
    activation: str,
    columns: bool,
) -> None:
    """Write the gradient of x, and hand the factors of those of parameters to `add`."""
    inputs = _inputs(x, weights, biases, columns)
    hidden = _activated(inputs, activation)
    add[-1](*((hidden.t(), grad) if columns else (grad.t(), hidden)))
    torch.mm(grad, _turned(down, columns), out=hidden)  # now the gradient of hidden
    for at, (inner, weight) in enumerate(zip(_activation_backward(hidden, inputs, activation), weights, strict=True)):
        grad_x.addmm_(inner, _turned(weight, columns), beta=1 if at else 0)
        add[at](*((x.t(), inner) if columns else (inner.t(), x)))
        if biases:
            add[len(weights) + at](inner, None)


def _add(total: Tensor, result: Tensor, is_first: bool, left: Tensor, right: Tensor | None) -> None:
    """left @ right, or the sum of the rows of `left`, to the total; `result` is room for a product in its dtype."""
    if right is not None and total is result:
        total.addmm_(left, right, beta=0 if is_first else 1)
        return
    part = left.sum(0, dtype=total.dtype) if right is None else torch.mm(left, right, out=result)
    if is_first:
        total.copy_(part)
    else:
        total.add_(part)


def _tiles(x: Tensor) -> Iterator[slice]:
    length = tile_rows(*x.shape)
    for first in range(0, max(len(x), 1), length):
        yield slice(first, min(first + length, len(x)))


def _inputs(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], columns: bool) -> list[Tensor]:
    """What the activation reads, (rows, F) each."""
    turned = [_turned(weight, not columns) for weight in weights]
    if not biases:
        return [torch.mm(x, weight) for weight in turned]
    return [torch.addmm(bias, x, weight) for bias, weight in zip(biases, turned, strict=True)]


def _turned(weight: Tensor, is_turned: bool) -> Tensor:
    return weight.t() if is_turned else weight


def _activated(inputs: Sequence[Tensor], activation: str) -> Tensor:
    found: Tensor = gated(*inputs, activation) if len(inputs) == 2 else PLAIN[activation][0](inputs[0])
    return found


def _activation_backward(grad: Tensor, inputs: Sequence[Tensor], activation: str) -> Sequence[Tensor]:
    """Gradients of what the activation reads."""
    if len(inputs) == 2:
        found: tuple[Tensor, Tensor] = gated_backward(grad, *inputs, activation)
        return found
    return (PLAIN[activation][1](grad, inputs[0]),)


Function = Callable[..., Tensor]
PLAIN: Mapping[str, tuple[Function, Function]] = {
    "gelu": (functional.gelu, _aten.gelu_backward.default),
    "gelu_tanh": (
        partial(functional.gelu, approximate="tanh"),
        partial(_aten.gelu_backward.default, approximate="tanh"),
    ),
    "relu": (functional.relu, partial(_aten.threshold_backward.default, threshold=0)),
    "silu": (functional.silu, _aten.silu_backward.default),
}
"""Activations of one tensor, and their backward of (gradient, what the activation read)."""

tiled_mlp = torch.library.custom_op(
    "autopar::tiled_mlp",
    tiled_mlp_reference,
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor[] biases, Tensor down, str activation, bool columns) -> Tensor",
)
tiled_mlp_backward = torch.library.custom_op(
    "autopar::tiled_mlp_backward",
    tiled_mlp_backward_reference,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor[] weights, Tensor[] biases, Tensor down, str activation, bool columns)"
    " -> Tensor[]",
)


@tiled_mlp.register_fake
def _(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], down: Tensor, activation: str, columns: bool
) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[1 if columns else 0])


@tiled_mlp_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    down: Tensor,
    activation: str,
    columns: bool,
) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (x, *weights, *biases, down)]
