"""FLOPs of the rules: what torch's own counter says of the same call, and by hand for what it does not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (registers grouped_mm_fallback)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autopar.ops import tiled_mlp  # noqa: F401 (it is registered)
from autopar.rules.call import Call, TensorSpec
from autopar.rules.engine import rule_of

aten, own, grouped = torch.ops.aten, torch.ops.autopar, torch.ops.transformers


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def flops(target: Any, *arguments: Any, outputs: tuple[Tensor, ...]) -> float:
    """Of the rule of this call."""

    def spec(value: Any) -> Any:
        if isinstance(value, Tensor):
            return TensorSpec(tuple(value.shape), value.dtype)
        return tuple(spec(item) for item in value) if isinstance(value, list | tuple) else value

    rule = rule_of(Call(target, spec(arguments), (), tuple(spec(output) for output in outputs)))
    assert rule is not None
    return rule.flops


COUNTED_BY_TORCH = {
    "mm": (aten.mm.default, meta(3, 5), meta(5, 7)),
    "bmm": (aten.bmm.default, meta(2, 3, 5), meta(2, 5, 7)),
    "convolution": (
        aten.convolution.default, meta(2, 3, 9, 8), meta(5, 3, 2, 3), None, [1, 2], [1, 0], [1, 1], False, [0, 0], 1,
    ),
    "transposed": (
        aten.convolution.default, meta(2, 3, 9, 8), meta(3, 5, 2, 3), None, [2, 1], [0, 0], [1, 1], True, [0, 0], 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED_BY_TORCH)
def test_products_and_convolutions_count_as_torch_counts(name: str) -> None:
    target, *arguments = COUNTED_BY_TORCH[name]
    with FlopCounterMode(display=False) as counter:
        output = target(*arguments)
    assert counter.get_total_flops() > 0
    assert flops(target, *arguments, outputs=(output,)) == counter.get_total_flops()


BATCH, STEPS, CLASSES, LABELS = 3, 11, 7, 5
LOG_PROBABILITIES = meta(STEPS, BATCH, CLASSES)
LENGTHS = (meta(BATCH, LABELS, dtype=torch.long), meta(BATCH, dtype=torch.long), meta(BATCH, dtype=torch.long))
ROWS = (meta(6, 4), meta(2, 4, 5), meta(2, dtype=torch.int32))
Q, K, V = meta(2, 4, 6, 8), meta(2, 2, 5, 8), meta(2, 2, 5, 8)
X, UP, DOWN = meta(6, 4), meta(9, 4), meta(5, 9)
COUNTED_BY_HAND = {
    # gated, 6 rows: two products in front of the activation and one behind it; backward makes the first two again, and
    # two gradients of each of the three
    "tiled_mlp": (
        2 * 6 * 9 * (4 + 4 + 5), (meta(6, 5),), own.tiled_mlp.default, X, [UP, UP], [], DOWN, "silu", False,
    ),
    "tiled_mlp_backward": (
        2 * 6 * 9 * (3 * (4 + 4) + 2 * 5), (X, UP, UP, DOWN),
        own.tiled_mlp_backward.default, meta(6, 5), X, [UP, UP], [], DOWN, "silu", False,
    ),
    "mv": (2 * 3 * 5, (meta(3),), aten.mv.default, meta(3, 5), meta(5)),
    "dot": (2 * 5, (meta(),), aten.dot.default, meta(5), meta(5)),
    "vdot": (2 * 5, (meta(),), aten.vdot.default, meta(5), meta(5)),
    # every row meets the matrix of its expert; backward: the gradients of rows and of matrices
    "grouped_mm": (2 * 6 * 4 * 5, (meta(6, 5),), grouped.grouped_mm_fallback.default, *ROWS),
    "grouped_mm_backward": (
        4 * 6 * 4 * 5, ROWS[:2], grouped.grouped_mm_fallback_backward.default, *ROWS, meta(6, 5),
    ),
    # 20 per step, sample and label; backward 60, and 5 per class
    "ctc_loss": (
        20 * STEPS * BATCH * LABELS, (meta(BATCH),), own.ctc_loss.default, LOG_PROBABILITIES, *LENGTHS, 0, False,
    ),
    "ctc_loss_backward": (
        60 * STEPS * BATCH * LABELS + 5 * STEPS * BATCH * CLASSES, (LOG_PROBABILITIES,),
        own.ctc_loss_backward.default, meta(BATCH), LOG_PROBABILITIES, *LENGTHS, 0, False,
    ),
    # scores and their product with the values, for each of 2 x 4 heads and 6 x 5 pairs of size 8
    "attention": (
        2 * (2 * 2 * 4 * 6 * 5 * 8), (meta(2, 4, 6, 8), meta(2, 4, 6)),
        own.attention.default, Q, K, V, None, 0.0, False, None, 3,
    ),
    # backward: scores again, and the gradients of query, key, value and scores
    "attention_backward": (
        5 * (2 * 2 * 4 * 6 * 5 * 8), (Q, K, V),
        own.attention_backward.default, Q, Q, K, V, None, Q, meta(2, 4, 6), 0.0, False, None, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED_BY_HAND)
def test_what_torch_does_not_count_is_counted_by_hand(name: str) -> None:
    expected, outputs, target, *arguments = COUNTED_BY_HAND[name]
    assert flops(target, *arguments, outputs=outputs) == expected
