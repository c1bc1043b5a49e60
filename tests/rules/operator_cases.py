"""One case per rule of the table (some have several): operator and arguments for a base size.

Values are signed and distinct; positions contain duplicates, ignored labels (-100, where the captured graph masks
them itself) and padding ids. Base sizes are 12 (even over 2, 3, 4) and 7 and 5 (uneven).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers.integrations.moe  # noqa: F401 (registers grouped_mm_fallback)

from tests.rules import (
    cases_attention,
    cases_dims,
    cases_elementwise,
    cases_experts,
    cases_indexing,
    cases_leftovers,
    cases_matrices,
    cases_norms,
    cases_pooling,
    cases_random,
    cases_recurrent,
    cases_shifts,
    cases_spatial,
    cases_statistics,
)
from tests.rules.case_values import Arguments, Case, bools, case, distinct, ids, x

aten = torch.ops.aten


def _group_norm_backward(s: int) -> Arguments:
    value, weight = x(s, 8, 3), x(8)
    _, mean, rstd = aten.native_group_norm.default(value, weight, None, s, 8, 3, 4, 1e-5)
    return x(s, 8, 3), value, mean, rstd, weight, s, 8, 3, 4, [True, True, True]


def _batch_norm_backward(train: bool) -> Callable[[int], Arguments]:
    def build(s: int) -> Arguments:
        value, weight, mean, var = x(s, 6, 2, 3), x(6), x(6), x(6).abs() + 0.5
        target = aten._native_batch_norm_legit_functional.default
        _, save_mean, save_invstd, _, _ = target(value, weight, x(6), mean, var, train, 0.1, 1e-5)
        mask = [True, True, True]
        return x(s, 6, 2, 3), value, weight, mean, var, save_mean, save_invstd, train, 1e-5, mask

    return build


def _max_pool_backward(s: int) -> Arguments:
    value = x(s, 3, 6, 6)
    out, indices = aten.max_pool2d_with_indices.default(value, [2, 2], [2, 2])
    return x(*out.shape), value, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


def _max_pool3d_backward(s: int) -> Arguments:
    value = x(s, 2, 4, 4, 4)
    out, indices = aten.max_pool3d_with_indices.default(value, [2, 2, 2], [2, 2, 2])
    return x(*out.shape), value, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, indices


def _adaptive_max_pool_backward(s: int) -> Arguments:
    value = x(s, 3, 6, 6)
    out, indices = aten.adaptive_max_pool2d.default(value, [2, 3])
    return x(*out.shape), value, indices


MATRICES = [
    case(aten.mm.default, lambda s: (x(s, 6), x(6, s + 1))),
    case(aten.mm.default, lambda s: (x(3, s), x(s, 4)), "contracted"),
    case(aten.bmm.default, lambda s: (x(s, 3, 4), x(s, 4, 5))),
    case(aten.mv.default, lambda s: (x(s, 6), x(6))),
    case(aten.dot.default, lambda s: (x(s), x(s))),
    case(aten.vdot.default, lambda s: (x(s), x(s))),
    case(aten.mm.default, lambda s: (x(s, s), x(s, s)), "square"),
]


def _grouped(s: int) -> Arguments:
    return x(6, s), x(3, s, 5), torch.tensor([1, 4, 6], dtype=torch.int32)


EXPERTS = [
    case(torch.ops.transformers.grouped_mm_fallback.default, _grouped),
    case(torch.ops.transformers.grouped_mm_fallback_backward.default, lambda s: (*_grouped(s), x(6, 5))),
]

ELEMENTWISE = [
    case(aten.add.Tensor, lambda s: (x(s, 1, 4), x(6, 4))),
    case(aten.add.Tensor, lambda s: (x(s, 4), x(s, 4)), "alpha", alpha=-2),
    case(aten.sub.Tensor, lambda s: (x(s, 4), x(4))),
    case(aten.neg.default, lambda s: (x(s, 4),)),
    case(aten.clone.default, lambda s: (x(s, 4),)),
    case(aten.mul.Tensor, lambda s: (x(s, 4), x(4))),
    case(aten.mul.Tensor, lambda s: (x(s, 4), x()), "scalar"),
    case(aten.mul.Tensor, lambda s: (x(), x(s, 4)), "scalar_first"),
    case(aten.mul.Scalar, lambda s: (x(s, 4), -2.5)),
    case(aten.div.Tensor, lambda s: (x(s, 4), x())),
    case(aten.div.Scalar, lambda s: (x(s, 4), -2.5)),
    case(aten.exp.default, lambda s: (x(s, 4),)),
    case(aten.where.self, lambda s: (bools(s, 4), x(s, 4), x())),
    case(aten.gelu_backward.default, lambda s: (x(s, 4), x(s, 4))),
    case(aten.addcmul.default, lambda s: (x(s, 4), x(4), x(s, 1))),
    case(aten.copy.default, lambda s: (x(s, 4), x(s, 4))),
    case(aten.softplus_backward.default, lambda s: (x(s, 4), x(s, 4), 1.0, 20.0)),
    case(aten._to_copy.default, lambda s: (x(s, 4),), dtype=torch.float32),
    case(aten._to_copy.default, lambda s: (x(s, 4),), "to_int", dtype=torch.int64),
]

REDUCTIONS = [
    case(aten.sum.dim_IntList, lambda s: (x(s, 4, 6), [0, -1])),
    case(aten.sum.dim_IntList, lambda s: (x(s, 4), [0], True), "keepdim"),
    case(aten.sum.dim_IntList, lambda s: (x(s, 4), []), "all"),
    case(aten.sum.default, lambda s: (x(s, 4),)),
    case(aten.mean.dim, lambda s: (x(s, 4, 6), [0, 2])),
    case(aten.mean.dim, lambda s: (x(4, s), [-1], True), "keepdim"),
    case(aten.mean.default, lambda s: (x(s, 4),)),
    case(aten.amax.default, lambda s: (x(s, 4) - 9, [0])),
    case(aten.amin.default, lambda s: (x(4, s) + 9, [-1], True)),
    case(aten.max.default, lambda s: (x(s, 4) - 9,)),
    case(aten.min.default, lambda s: (ids(9, s, 4) + 5,), "integers"),
    case(aten.max.dim, lambda s: (x(s, 4), 1)),
    case(aten.min.dim, lambda s: (x(s, 4), 1, True)),
    case(aten.argmax.default, lambda s: (x(s, 4), -1)),
    case(aten.argmin.default, lambda s: (x(s, 4), 1, True)),
    case(aten.all.dim, lambda s: (bools(s, 4), 1)),
    case(aten.any.dim, lambda s: (bools(s, 4), 1, True)),
    case(aten.any.dims, lambda s: (bools(s, 4, 3), [1, 2])),
    case(aten.all.dims, lambda s: (bools(s, 4, 3), [1, 2])),
    case(aten.any.default, lambda s: (bools(s, 4),)),
    case(aten.all.default, lambda s: (bools(s, 4),)),
    case(aten.prod.dim_int, lambda s: (x(s, 4), 1)),
    case(aten.var.correction, lambda s: (x(s, 4), [1]), correction=1),
    case(aten.var_mean.correction, lambda s: (x(s, 4, 3), [1]), correction=0, keepdim=True),
    case(aten.std.correction, lambda s: (x(s, 4), [1]), correction=1),
    case(aten.logsumexp.default, lambda s: (x(s, 4), [-1])),
    case(aten.linalg_vector_norm.default, lambda s: (x(s, 4), 2, [1])),
]

ALONG_A_DIM = [
    case(aten.cumsum.default, lambda s: (x(s, 4), 1)),
    case(aten.cumprod.default, lambda s: (x(s, 4), 1)),
    case(aten.logcumsumexp.default, lambda s: (x(s, 4), 1)),
    case(aten.topk.default, lambda s: (x(s, 6), 2)),
    case(aten.sort.default, lambda s: (x(s, 6), -1, True)),
    case(aten.argsort.default, lambda s: (x(s, 6),)),
    case(aten.flip.default, lambda s: (x(s, 6, 3), [1])),
    case(aten.roll.default, lambda s: (x(s, 6), [2], [1])),
    case(aten.glu.default, lambda s: (x(s, 6), 1)),
    case(aten.glu_backward.default, lambda s: (x(s, 3), x(s, 6), 1)),
    case(aten.cat.default, lambda s: ([x(s, 2), x(s, 5), x(s, 1)], 1)),
    case(aten.cat.default, lambda s: ([x(0), x(s, 2), x(0), x(s, 3)], -1), "of nothing"),
    case(aten.stack.default, lambda s: ([x(s, 2), x(s, 2)], 1)),
    case(aten.slice.Tensor, lambda s: (x(s, 6), 1, 1, -1, 2)),
    case(aten.slice_scatter.default, lambda s: (x(s, 6), x(s, 2), 1, 2, 4)),
    case(aten.select.int, lambda s: (x(s, 6, 3), 1, -2)),
    case(aten.select_scatter.default, lambda s: (x(s, 6, 3), x(s, 3), 1, -2)),
    case(aten.split_with_sizes.default, lambda s: (x(s, 6), [1, 5], -1)),
    case(aten.split.Tensor, lambda s: (x(s, 6), 4, 1)),
    case(aten.unbind.int, lambda s: (x(s, 3), 1)),
    case(aten.tril.default, lambda s: (x(s, 4, 4),)),
    case(aten.triu.default, lambda s: (x(s, 4, 4), 1)),
    case(aten.bucketize.Tensor, lambda s: (x(s, 4), torch.arange(-2.0, 3.0, dtype=torch.float64))),
    case(aten.histc.default, lambda s: (x(s), 5, -2, 2)),
]

RESHAPED = [
    case(aten.expand.default, lambda s: (x(s, 1, 4), [3, s, 5, 4])),
    case(aten.expand.default, lambda s: (x(), [s, 4]), "scalar"),
    case(aten.repeat.default, lambda s: (x(6, 4), [s, 2, 1])),
    case(aten.constant_pad_nd.default, lambda s: (x(s, 4), [1, 2])),
    case(aten.constant_pad_nd.default, lambda s: (x(s, 4), [1, -2], 0.5), "value"),
]

LOOKUPS = [
    case(aten.embedding.default, lambda s: (x(s, 4), ids(s, 3, 6))),
    case(aten.embedding_dense_backward.default, lambda s: (x(6, s, 4), ids(s, 6, s), s, 2, False)),
    case(aten.embedding_dense_backward.default, lambda s: (x(s, 4), ids(5, s), 5, -1, True), "by_frequency"),
    case(aten.gather.default, lambda s: (x(6, s), 1, ids(s, 6, 5))),
    case(aten.gather.default, lambda s: (x(6, s), 1, ids(s, 6, 1)), "labels"),
    case(aten.gather.default, lambda s: (x(s, 6), 0, ids(s, 4, 5)), "smaller_index"),
    case(aten.scatter.value, lambda s: (x(6, s), 1, ids(s, 6, 1), -1.0), "labels"),
    case(aten.scatter.value, lambda s: (x(6, s), 1, ids(s, 6, 5), -1.0)),
    case(aten.scatter.src, lambda s: (x(6, s), 1, distinct(s, 6, 4), x(6, 4))),
    case(aten.scatter.src, lambda s: (x(6, s), 1, ids(s, 6, 1), x(6, 1)), "single"),
    case(aten.scatter_add.default, lambda s: (x(6, s), 1, ids(s, 6, 5), x(6, 5))),
    case(aten.index_select.default, lambda s: (x(4, s), 1, ids(s, 6))),
    case(aten.index_add.default, lambda s: (x(s, 5), 1, ids(5, 6), x(s, 6))),
    case(aten.index.Tensor, lambda s: (x(4, s, 3), [None, ids(s, 6, 5) - s // 2])),
    case(aten.index.Tensor, lambda s: (x(4, 5, s), [ids(4, s), ids(5, s)]), "two"),
    case(aten.index.Tensor, lambda s: (x(4, s, 5), [ids(4, 6, 1), None, ids(5, 6)]), "apart"),
    case(aten._unsafe_index.Tensor, lambda s: (x(s, 4, 5), [None, ids(4, 3, 1), ids(5, 6)])),
    case(aten.index_put.default, lambda s: (x(s, 4), [ids(s, 6)], x(6, 4), True)),
    case(aten.index_put.default, lambda s: (x(3, s, 4), [None, distinct(s, 4) - s // 2], x(4, 1)), "assign"),
    case(aten.index_put.default, lambda s: (x(5, 4, s), [ids(5, 6), ids(4, 6)], x(6, s), True), "two"),
    case(aten._unsafe_index_put.default, lambda s: (x(s, 4), [ids(s, 6)], x(4), True)),
]

NORMS = [
    case(aten.native_group_norm.default, lambda s: (x(s, 8, 3), x(8), x(8), s, 8, 3, 4, 1e-5)),
    case(aten.native_group_norm_backward.default, _group_norm_backward),
    case(
        aten._native_batch_norm_legit_functional.default,
        lambda s: (x(s, 6, 2, 3) + 3, x(6), x(6), x(6), x(6).abs(), True, 0.1, 1e-5),
    ),
    case(
        aten._native_batch_norm_legit_functional.default,
        lambda s: (x(s, 6), None, None, x(6), x(6).abs(), False, 0.1, 1e-5),
        "evaluation",
    ),
    case(aten._native_batch_norm_legit.no_stats, lambda s: (x(s, 6, 3), x(6), x(6), True, 0.1, 1e-5)),
    case(aten.native_batch_norm_backward.default, _batch_norm_backward(True)),
    case(aten.native_batch_norm_backward.default, _batch_norm_backward(False), "evaluation"),
]

CONVOLUTIONS = [
    case(
        aten.convolution.default,
        lambda s: (x(s, 4, 6, 5), x(6, 4, 3, 3), x(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    case(
        aten.convolution.default,
        lambda s: (x(3, s, 6), x(4, s, 3), None, [2], [1], [1], False, [0], 1),
        "one_dim",
    ),
    case(
        aten.convolution.default,
        lambda s: (x(s, 8, 6), x(12, 2, 3), x(12), [1], [1], [1], False, [0], 4),
        "groups",
    ),
    case(
        aten.convolution.default,
        lambda s: (x(s, 8, 6), x(8, 3, 3), x(12), [2], [1], [1], True, [1], 4),
        "transposed",
    ),
    case(
        aten.convolution_backward.default,
        lambda s: (
            *(x(s, 6, 6, 5), x(s, 4, 6, 5), x(6, 4, 3, 3), [6]),
            *([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]),
        ),
    ),
    case(
        aten.convolution_backward.default,
        lambda s: (x(s, 12, 6), x(s, 8, 6), x(12, 2, 3), None, [1], [1], [1], False, [0], 4, [True, True, False]),
        "groups",
    ),
    case(
        aten.convolution_backward.default,
        lambda s: (x(s, 12, 12), x(s, 8, 6), x(8, 3, 3), [12], [2], [1], [1], True, [1], 4, [True, True, True]),
        "transposed",
    ),
]

POOLING = [
    case(aten.max_pool2d_with_indices.default, lambda s: (x(s, 3, 6, 6), [2, 2], [2, 2])),
    case(aten.max_pool2d_with_indices_backward.default, _max_pool_backward),
    case(aten.max_pool3d_with_indices.default, lambda s: (x(s, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2])),
    case(aten.max_pool3d_with_indices_backward.default, _max_pool3d_backward),
    case(aten.avg_pool1d.default, lambda s: (x(s, 3, 6), [2])),
    case(aten.avg_pool2d.default, lambda s: (x(s, 3, 6, 6), [2, 2], [2, 2], [1, 1])),
    case(
        aten.avg_pool2d_backward.default,
        lambda s: (x(s, 3, 3, 3), x(s, 3, 6, 6), [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    case(aten.avg_pool3d.default, lambda s: (x(s, 2, 4, 4, 4), [2, 2, 2])),
    case(
        aten.avg_pool3d_backward.default,
        lambda s: (
            *(x(s, 2, 2, 2, 2), x(s, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2]),
            *([0, 0, 0], False, True, None),
        ),
    ),
    case(aten._adaptive_avg_pool2d.default, lambda s: (x(s, 3, 6, 6), [2, 3])),
    case(aten._adaptive_avg_pool2d_backward.default, lambda s: (x(s, 3, 2, 3), x(s, 3, 6, 6))),
    case(aten._adaptive_avg_pool3d.default, lambda s: (x(s, 2, 4, 4, 4), [2, 2, 2])),
    case(aten._adaptive_avg_pool3d_backward.default, lambda s: (x(s, 2, 2, 2, 2), x(s, 2, 4, 4, 4))),
    case(aten.adaptive_max_pool2d.default, lambda s: (x(s, 3, 6, 6), [2, 3])),
    case(aten.adaptive_max_pool2d_backward.default, _adaptive_max_pool_backward),
    case(aten.upsample_nearest2d.default, lambda s: (x(s, 3, 2, 2), [4, 4])),
    case(aten.upsample_nearest2d_backward.default, lambda s: (x(s, 3, 4, 4), [4, 4], [s, 3, 2, 2])),
    case(aten.upsample_bilinear2d.default, lambda s: (x(s, 3, 2, 2), [4, 4], False)),
    case(aten.upsample_bilinear2d_backward.default, lambda s: (x(s, 3, 4, 4), [4, 4], [s, 3, 2, 2], False)),
    case(aten.reflection_pad2d.default, lambda s: (x(s, 3, 4, 4), [1, 1, 1, 1])),
    case(aten.reflection_pad2d_backward.default, lambda s: (x(s, 3, 6, 6), x(s, 3, 4, 4), [1, 1, 1, 1])),
]

FACTORIES = [
    case(aten.full.default, lambda s: ([s, 4], 2.5), dtype=torch.float64),
    case(aten.zeros.default, lambda s: ([s, 4],)),
    case(aten.ones.default, lambda s: ([s, 4],)),
    case(aten.empty.memory_format, lambda s: ([s, 4],)),
    case(aten.empty_permuted.default, lambda s: ([s, 4], [1, 0])),
    case(aten.scalar_tensor.default, lambda s: (2.5,)),
    case(aten.arange.start_step, lambda s: (3, 3 + 2 * s, 2)),
    case(aten.arange.start_step, lambda s: (1.0, 1.0 - 0.5 * s, -0.5), "negative", dtype=torch.float64),
    case(aten.arange.start_step, lambda s: (float(s), 0.0, -1.0), "integers of floats", dtype=torch.int64),
    case(aten.arange.start, lambda s: (-2, s - 2)),
    case(aten.arange.default, lambda s: (s,)),
]

CASES: list[Case] = [
    *(*MATRICES, *EXPERTS, *ELEMENTWISE, *REDUCTIONS, *ALONG_A_DIM, *RESHAPED, *LOOKUPS),
    *(*NORMS, *CONVOLUTIONS, *POOLING, *FACTORIES),
    *cases_attention.CASES,
    *cases_dims.CASES,
    *cases_elementwise.CASES,
    *cases_experts.CASES,
    *cases_indexing.CASES,
    *cases_matrices.CASES,
    *cases_norms.CASES,
    *cases_leftovers.CASES,
    *cases_random.CASES,
    *cases_recurrent.CASES,
    *cases_pooling.CASES,
    *cases_shifts.CASES,
    *cases_spatial.CASES,
    *cases_statistics.CASES,
]
