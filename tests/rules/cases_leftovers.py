"""Cases of the CTC loss and of running sums along a split dim."""

from __future__ import annotations

import torch

from tests.rules.case_values import Arguments, Case, case, x

aten = torch.ops.aten
ours = torch.ops.autopar


def _ctc(s: int) -> Arguments:
    """Speech of 9 steps, 5 classes; one target is empty, one too long for its input."""
    input_lengths = 4 + torch.arange(s) % 6
    target_lengths = torch.arange(s) % 4
    input_lengths[s - 1], target_lengths[s - 1] = 1, 3
    return x(9, s, 5).log_softmax(-1), torch.randint(1, 5, (s, 4)), input_lengths, target_lengths, 0, True


CASES: list[Case] = [
    case(ours.ctc_loss.default, _ctc),
    case(ours.ctc_loss_backward.default, lambda s: (x(s), *_ctc(s))),
    case(aten.cumsum.default, lambda s: (x(4, s, 3), -2), "along"),
    case(aten.cumsum.default, lambda s: (torch.rand(s, 3) > 0.4, 0), "of_bools"),
    case(aten.cumsum.default, lambda s: (torch.arange(4 * s).view(4, s) - s, 1), "widened", dtype=torch.float64),
]
