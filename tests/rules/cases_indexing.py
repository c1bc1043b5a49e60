"""Cases of operators that read and write by position: duplicates, negative positions, masks, values that broadcast."""

from __future__ import annotations

import torch

from tests.rules.case_values import Case, bools, case, distinct, ids, x

aten = torch.ops.aten

WRITES = [
    case(aten.index_put.default, lambda s: (x(6, 4), [ids(6, s)], x(s, 4), True), "edges"),
    case(aten.index_put.default, lambda s: (x(6, 5), [ids(6, s, 1), ids(5, 3)], x(s, 3), True), "edges_two"),
    case(aten.index_put.default, lambda s: (x(5, 4), [ids(5, s)], x(), True), "edges_number"),
    case(aten.index_put.default, lambda s: (x(s, 4), [bools(s, 4)], x()), "mask"),
    case(aten.index_put.default, lambda s: (x(s, 6, 4), [bools(s, 6)], x(4), True), "mask_rows"),
    case(aten.index_put.default, lambda s: (x(s, 6, 4), [None, bools(6)], x(s, 1, 1)), "mask_inner"),
    case(aten.scatter_add.default, lambda s: (x(6, 4), 0, ids(6, s, 4), x(s, 4)), "edges"),
    case(aten.scatter_add.default, lambda s: (x(5, 3), 0, ids(5, s, 3), x(s + 1, 3)), "longer_source"),
    case(aten.scatter_reduce.two, lambda s: (x(6, 4), 0, ids(6, s, 4), x(s, 4), "amax")),
    case(aten.scatter_reduce.two, lambda s: (x(6, 4), 0, ids(6, s, 4), x(s, 4), "amin"), "smallest"),
    case(aten.scatter_reduce.two, lambda s: (x(6, s), 0, ids(6, 4, s), x(4, s), "mean"), "mean", include_self=False),
    case(aten.scatter.reduce, lambda s: (x(6, s), 0, distinct(6, s, 4).T, x(4, s)), reduce="multiply"),
    case(aten.scatter.value_reduce, lambda s: (x(6, s), 0, ids(6, 4, s), -2.0), reduce="add"),
    case(aten.index_add.default, lambda s: (x(5, s), 0, ids(5, 6), x(6, s)), "columns", alpha=-2),
    case(aten.index_add.default, lambda s: (x(4, 6), 1, ids(6, s), x(4, s)), "edges"),
    case(aten.index_copy.default, lambda s: (x(4, s), 1, distinct(s, 3), x(4, 3))),
    case(aten.index_fill.int_Scalar, lambda s: (x(4, s), 1, ids(s, 3), -2.0)),
    case(aten.index_fill.int_Tensor, lambda s: (x(s, 6), 1, ids(6, 3) - 6, x())),
    case(aten.index_reduce.default, lambda s: (x(6, s), 0, ids(6, 5), x(5, s), "prod")),
    case(aten.put.default, lambda s: (x(s, 4), distinct(s * 4, 5), x(5))),
    case(aten.masked_scatter.default, lambda s: (x(s, 4), bools(s, 4), x(s, 4))),
]

READS = [
    case(aten.index.Tensor, lambda s: (x(6, 4), [ids(6, s) - 3]), "edges"),
    case(aten.take.default, lambda s: (x(5, 6), ids(30, s, 4))),
    case(aten.searchsorted.Tensor, lambda s: (x(s, 6).sort(-1)[0], x(s, 4))),
    case(aten.searchsorted.Tensor, lambda s: (x(6).sort()[0], x(s, 4)), "one_row"),
    case(aten.searchsorted.Scalar, lambda s: (x(s).sort()[0], 0.25)),
    case(aten.bucketize.Scalar, lambda s: (0.25, x(s).sort()[0])),
    case(aten.repeat_interleave.Tensor, lambda s: (ids(3, s) + 1,)),
    case(aten.nonzero_static.default, lambda s: (ids(2, s, 4),), size=5),
]


CASES: list[Case] = [*WRITES, *READS]
