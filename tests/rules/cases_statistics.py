"""Cases of reductions that need statistics of the whole dim."""

from __future__ import annotations

import math

import torch

import autopar.ops.linear_recurrence
import autopar.ops.prefix_sums  # noqa: F401 (registers reverse_cumsum)
from tests.rules.case_values import Case, case, x

aten = torch.ops.aten

CASES: list[Case] = [
    case(aten.var.correction, lambda s: (x(4, s) + 5, [1]), "reduced", correction=0),
    case(aten.var.correction, lambda s: (x(4, s),), "everything"),
    case(aten.std.correction, lambda s: (x(4, s, 3), [1, 2]), "reduced", correction=1, keepdim=True),
    case(aten.var_mean.correction, lambda s: (x(4, s), [-1]), "reduced", correction=1),
    case(aten.logsumexp.default, lambda s: (100 * x(4, s), [1]), "reduced"),
    case(aten.logsumexp.default, lambda s: (x(4, s), [0, 1], True), "kept"),
    case(aten.linalg_vector_norm.default, lambda s: (x(4, s), 2, [1], True), "reduced"),
    case(aten.linalg_vector_norm.default, lambda s: (x(4, s),), "everything"),
    case(aten.linalg_vector_norm.default, lambda s: (x(4, s), 1, [1]), "one"),
    case(aten.linalg_vector_norm.default, lambda s: (x(4, s), math.inf, [1]), "largest"),
    case(aten.linalg_vector_norm.default, lambda s: (x(4, s), 3, [1]), "three"),
    case(torch.ops.autopar.reverse_cumsum.default, lambda s: (x(s, 4), -1)),
    case(torch.ops.autopar.reverse_cumsum.default, lambda s: (x(2, s, 3), 1), "split"),
    case(torch.ops.autopar.linear_recurrence.default, lambda s: (x(s, 5).sigmoid(), x(s, 5), 1, False)),
    case(torch.ops.autopar.linear_recurrence.default, lambda s: (x(2, s, 3), x(2, s, 3), -2, False), "split"),
    case(torch.ops.autopar.linear_recurrence.default, lambda s: (x(s, 3), x(s, 3), 0, True), "from the end"),
    case(aten.any.default, lambda s: (torch.arange(s) == s - 1,), "last"),
    case(aten.all.dim, lambda s: (torch.rand(4, s) > 0.2, 1), "reduced"),
    case(aten.any.dims, lambda s: (torch.rand(4, s) > 0.9, [1], True), "reduced"),
]
