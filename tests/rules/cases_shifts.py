"""Cases of operators that move rows along a dim which is split, to outputs of the same length and of others."""

from __future__ import annotations

import torch

from tests.rules.case_values import Case, case, ids, x

aten = torch.ops.aten

CASES: list[Case] = [
    case(aten.slice.Tensor, lambda s: (x(3, s), 1, 0, -1), "but the last"),
    case(aten.slice.Tensor, lambda s: (x(s, 3), 0, 1, 9223372036854775807), "but the first"),
    case(aten.slice.Tensor, lambda s: (ids(9, 2, s, 3), 1, 1, s - 1), "but both ends"),
    case(aten.constant_pad_nd.default, lambda s: (x(2, s), [1, -1]), "shifted"),
    case(aten.constant_pad_nd.default, lambda s: (x(2, s, 3), [0, 0, -1, 1]), "shifted back"),
    case(aten.constant_pad_nd.default, lambda s: (x(2, s), [1, 0], 0.5), "longer"),
    case(aten.constant_pad_nd.default, lambda s: (x(s, 4, s, 3), [0, 0, 1, 1, 0, 0, -1, 0], 2.0), "two dims"),
    case(aten.constant_pad_nd.default, lambda s: (ids(9, 2, s), [0, 1], -100), "labels"),
    case(aten.roll.default, lambda s: (x(2, s), [-1], [1]), "by one"),
    case(aten.roll.default, lambda s: (x(s, s + 1), [2, s - 1], [0, 1]), "both dims"),
    case(aten.roll.default, lambda s: (x(s, 3), [2], []), "as one dim"),
    case(aten.flip.default, lambda s: (x(2, s), [1]), "split"),
    case(aten.flip.default, lambda s: (x(s, 3, s), [0, 2]), "two dims"),
]
