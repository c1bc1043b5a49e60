"""Cases of expert products: uneven rows, experts without rows, all rows to one expert, ids of no expert.

torch's grouped product has no fp64 kernel; small integers in fp32 make its sums exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.rules.case_values import Arguments, Case, case, ids, x

aten = torch.ops.aten
autopar_ops = torch.ops.autopar

NUM_EXPERTS = 5


def _some_without_rows(s: int) -> Tensor:
    """Ids of which expert 2 gets none; the first two belong to no expert."""
    expert_ids = ids(NUM_EXPERTS, s)
    expert_ids[expert_ids == 2] = 4
    expert_ids[:2] = torch.tensor([-1, NUM_EXPERTS])
    return expert_ids


def _to_one(s: int) -> Tensor:
    return torch.full((s,), 3)


def _integers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape).float()


def _ends(rows: int) -> Tensor:
    return torch.tensor([2, 2, rows], dtype=torch.int32)


def _grouped_rows(s: int) -> Arguments:
    return _integers(6, 4 * s), _integers(3, 4 * s, 16), _ends(6)


def _grouped_columns(s: int) -> Arguments:
    return _integers(3, 16, 4 * s), _integers(4 * s, 8), _ends(8)


def _grouped_contracted(s: int) -> Arguments:
    return _integers(4 * s, 8), _integers(8, 16), _ends(8)


linear, outer = autopar_ops.expert_linear.default, autopar_ops.expert_outer.default

CASES: list[Case] = [
    case(linear, lambda s: (x(s, 6), x(NUM_EXPERTS, 6, 4), _some_without_rows(s), False)),
    case(linear, lambda s: (x(s, 6), x(NUM_EXPERTS, 4, 6), _some_without_rows(s), True), "transposed"),
    case(linear, lambda s: (x(s, 4), x(NUM_EXPERTS, 4, 3), _to_one(s), False), "one expert"),
    case(linear, lambda s: (x(8, s), x(s, s, 3), ids(s, 8), False), "uneven experts"),
    case(outer, lambda s: (x(s, 6), x(s, 4), _some_without_rows(s), NUM_EXPERTS, False)),
    case(outer, lambda s: (x(s, 6), x(s, 4), _some_without_rows(s), NUM_EXPERTS, True), "transposed"),
    case(outer, lambda s: (x(s, 4), x(s, 3), _to_one(s), NUM_EXPERTS, False), "one expert"),
    case(outer, lambda s: (x(8, s), x(8, 3), ids(s, 8), s, False), "uneven experts"),
    case(aten._grouped_mm.default, _grouped_rows, "rows"),
    case(aten._grouped_mm.default, _grouped_columns, "columns"),
    case(aten._grouped_mm.default, _grouped_contracted, "contracted"),
]
