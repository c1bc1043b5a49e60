"""Cases of operators along a dim: reductions, scans, order statistics, diagonals, windows, memory layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.rules.case_values import Arguments, Case, bools, case, ids, x

aten = torch.ops.aten


def _with_gaps(*shape: int) -> Tensor:
    return x(*shape).masked_fill(bools(*shape), float("nan"))


REDUCTIONS = [
    case(aten.nansum.default, lambda s: (_with_gaps(s, 4), [0])),
    case(aten.count_nonzero.default, lambda s: (ids(2, s, 4), 0)),
    case(aten.count_nonzero.dim_IntList, lambda s: (ids(2, s, 4, 3), [0, 2])),
    case(aten.aminmax.default, lambda s: (x(s, 4),), dim=0),
    case(aten.aminmax.default, lambda s: (x(s, 4),), "all"),
    case(aten.std_mean.correction, lambda s: (x(s, 4), [1]), correction=1),
    case(aten.prod.default, lambda s: (x(s, 4),)),
    case(aten.norm.Scalar, lambda s: (x(s, 4), 2)),
    case(aten.norm.ScalarOpt_dtype, lambda s: (x(s, 4), 2), dtype=torch.float64),
    case(aten.norm.ScalarOpt_dim, lambda s: (x(s, 4), 2, [1])),
    case(aten.norm.ScalarOpt_dim_dtype, lambda s: (x(s, 4), 2, [1], True), dtype=torch.float64),
    case(aten.median.default, lambda s: (x(s, 4),)),
    case(aten.median.dim, lambda s: (x(s, 5), 1)),
    case(aten.nanmedian.default, lambda s: (x(s, 4),)),
    case(aten.nanmedian.dim, lambda s: (x(s, 5), 1, True)),
    case(aten.mode.default, lambda s: (ids(3, s, 7),)),
    case(aten.kthvalue.default, lambda s: (x(s, 5), 2)),
    case(aten.histc.default, lambda s: (x(s, 3), 5, -2, 2), "counts_of_blocks"),
    case(aten.histc.default, lambda s: (x(s, 3), 5), "bins_from_values"),
    case(aten.trace.default, lambda s: (x(s, s),)),
]

MARGIN_LOSSES = [
    case(aten.multi_margin_loss.default, lambda s: (x(s, 4), ids(4, s), 1, 1.0, x(4))),
    case(aten.multi_margin_loss_backward.default, lambda s: (x(), x(s, 4), ids(4, s), 1, 1.0)),
    case(aten.multilabel_margin_loss_forward.default, lambda s: (x(s, 4), ids(4, s, 4), 1)),
    case(aten.multilabel_margin_loss_backward.default, lambda s: _multilabel(s)),
]


def _multilabel(s: int) -> Arguments:
    value, labels = x(s, 4), ids(4, s, 4)
    _, is_target = aten.multilabel_margin_loss_forward.default(value, labels, 1)
    return x(), value, labels, 1, is_target


SCANS = [
    case(aten.cummax.default, lambda s: (x(s, 5), 1)),
    case(aten.cummin.default, lambda s: (x(s, 5), 1)),
    case(aten.unsafe_split.Tensor, lambda s: (x(s, 5), 2, 1)),
    case(aten.unsafe_split_with_sizes.default, lambda s: (x(s, 5), [1, 4], 1)),
    case(aten.channel_shuffle.default, lambda s: (x(s, 6, 4, 3), 2)),
    case(aten.block_diag.default, lambda s: ([x(s, 2), x(3, 4)],)),
]

DIAGONALS = [
    case(aten.diagonal.default, lambda s: (x(s, 4, 5), 1, -2, -1)),
    case(aten.diagonal_backward.default, lambda s: (x(s, 4), [s, 4, 5], 1, 1, 2)),
    case(aten.diagonal_scatter.default, lambda s: (x(4, s, 5), x(s, 4), 1, 0, 2)),
    case(aten.diag_embed.default, lambda s: (x(s, 4), 1, 0, -1)),
]

WINDOWS = [
    case(aten.unfold.default, lambda s: (x(s, 7, 3), 1, 3, 2)),
    case(aten.unfold_backward.default, lambda s: (x(s, 3, 2, 3), [s, 7, 2], 1, 3, 2)),
    case(aten.unfold_backward.default, lambda s: (x(1, 3, 4), [s, 8], 1, 4, 2), "grows"),
    case(aten.as_strided.default, lambda s: (x(s, 6).t(), [s, 3], [6, 2], 1)),
    case(aten.as_strided_scatter.default, lambda s: (x(s, 6), x(s, 3), [s, 3], [6, 2], 1)),
]

CONSTANTS = [
    case(aten.eye.default, lambda s: (s,)),
    case(aten.eye.m, lambda s: (s, 4)),
    case(aten.linspace.default, lambda s: (-1.0, 1.0, s)),
    case(aten.logspace.default, lambda s: (-1.0, 1.0, s)),
    case(aten.range.step, lambda s: (1.0, s, 0.5)),
    case(aten.tril_indices.default, lambda s: (s, 4)),
    case(aten.triu_indices.default, lambda s: (s, 4, 1)),
    case(aten.hann_window.default, lambda s: (s,)),
    case(aten.hamming_window.default, lambda s: (s,)),
    case(aten.blackman_window.default, lambda s: (s,)),
    case(aten.bartlett_window.default, lambda s: (s,)),
]

CASES: list[Case] = [*REDUCTIONS, *MARGIN_LOSSES, *SCANS, *DIAGONALS, *WINDOWS, *CONSTANTS]
