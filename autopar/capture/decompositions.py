"""The decomposition table: which ATen operators reach the rules whole, and which are written as smaller ones.

Losses are split, so that a vocabulary-parallel loss falls out of the rules of max, sum and gather; `addmm` is split
into product and sum; views get one spelling. Attention, norms, softmax, embedding, GELU and SiLU stay whole, because
whole they have a simple rule and a fast kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar._compat import OpOverload, get_decompositions
from autopar.capture.batch_norms import BATCH_NORMS
from autopar.capture.foreach import foreach_decompositions
from autopar.capture.masked_scatter import masked_scatter, masked_scatter_backward

aten = torch.ops.aten

LOSSES = (
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.logsumexp.default,
)
VIEWS = (
    aten.t,
    aten.transpose.int,
    aten.unbind,
    aten.unsafe_split.Tensor,
    aten.stack,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.select_backward,
    aten.slice_backward,
)
COPIES = (
    aten.alias_copy,
    aten.as_strided_copy,
    aten.diagonal_copy,
    aten.expand_copy,
    aten.narrow_copy,
    aten.permute_copy,
    aten.select_copy,
    aten.slice_copy,
    aten.split_copy,
    aten.split_with_sizes_copy,
    aten.squeeze_copy,
    aten.t_copy,
    aten.transpose_copy,
    aten.unbind_copy,
    aten.unfold_copy,
    aten.unsqueeze_copy,
    aten.view_copy,
)
COMPOSED = (
    aten._euclidean_dist,
    aten._unsafe_masked_index,
    aten._unsafe_masked_index_put_accumulate,
    aten.addmv,
    aten.addr,
    aten.dist,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
    aten.renorm,
    aten.rot90,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
)
POINTWISE = (
    aten._safe_softmax,
    aten.softplus_backward,
    aten.floor_divide,
    aten.fill.Tensor,
    aten.fill.Scalar,
    aten.masked_fill,
    aten.std,
)
FACTORIES = (
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.zeros,
    aten.ones,
    aten.arange.default,
    aten.arange.start,
    aten.detach,
    aten.lift_fresh_copy,
)


@lru_cache(maxsize=1)
def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """Operator -> the function that spells it out."""
    table: dict[Any, Callable[..., Any]] = dict(
        get_decompositions([*LOSSES, *VIEWS, *COPIES, *COMPOSED, *POINTWISE, *FACTORIES])
    )
    table |= foreach_decompositions()
    table |= BATCH_NORMS
    table[aten.addmm.default] = _addmm
    table[aten.baddbmm.default] = _baddbmm
    table[aten.addbmm.default] = _addbmm
    table[aten.masked_scatter.default] = masked_scatter
    table[aten.masked_scatter_backward.default] = masked_scatter_backward
    return table


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(bias, beta) + _scaled(torch.mm(left, right), alpha)


def _baddbmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(bias, beta) + _scaled(torch.bmm(left, right), alpha)


def _addbmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(bias, beta) + _scaled(torch.bmm(left, right).sum(0), alpha)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
