"""Cases of operators that draw by global element index."""

from __future__ import annotations

import torch

from tests.rules.case_values import Case, autopar_ops, bools, case, x

CASES: list[Case] = [
    case(autopar_ops.dropout.default, lambda s: (x(s, 3, 4), 0.3, 5)),
    case(autopar_ops.dropout.default, lambda s: (x(3, s), 0.6, 6), "row"),
    case(autopar_ops.dropout_backward.default, lambda s: (x(s, 4), bools(s, 4), 0.3)),
    case(autopar_ops.uniform.default, lambda s: ([s, 3, 4], torch.float32, 1)),
    case(autopar_ops.uniform.default, lambda s: ([3, s], torch.bfloat16, 2), "bf16"),
    case(autopar_ops.uniform.default, lambda s: ([3, s], torch.float64, 2), "fp64"),
    case(autopar_ops.normal.default, lambda s: ([4, s], torch.float64, 3)),
    case(autopar_ops.exponential.default, lambda s: ([s, 2, 2], torch.float64, 4)),
    case(autopar_ops.integers.default, lambda s: ([s, 4], -3, 90, torch.int64, 5)),
    case(autopar_ops.integers.default, lambda s: ([s, 4], -5, 2**45, torch.int64, 5), "wide"),
]
