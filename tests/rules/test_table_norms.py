"""Rules of norms: how many bytes of statistics a split of the normalised dims adds up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.rules.call import Call, TensorSpec
from autopar.rules.engine import rule_of

aten = torch.ops.aten


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.bfloat16)


X, ROW, WEIGHT = spec(2, 3, 4, 5), spec(2, 3, 1, 1), spec(4, 5)
LAYER_NORM = (aten.native_layer_norm.default, (X, (4, 5), WEIGHT, WEIGHT, 1e-5), (X, ROW, ROW))
RMS_NORM = (aten._fused_rms_norm.default, (X, (4, 5), WEIGHT, 1e-5), (X, ROW))
LAYER_NORM_BACKWARD = (
    aten.native_layer_norm_backward.default, (X, X, (4, 5), ROW, ROW, WEIGHT, WEIGHT, (True, True, True)),
    (X, WEIGHT, WEIGHT),
)  # fmt: skip
SOFTMAX = (aten._softmax.default, (X, 2, False), (X,))
SOFTMAX_BACKWARD = (aten._softmax_backward_data.default, (X, X, 2, torch.bfloat16), (X,))


@pytest.mark.parametrize(
    ("call", "rows", "numbers", "names"),
    [
        (LAYER_NORM, 2 * 3, 2, {"n0", "n1"}),
        (LAYER_NORM_BACKWARD, 2 * 3, 2, {"n0", "n1"}),
        (RMS_NORM, 2 * 3, 1, {"n0", "n1"}),
        (SOFTMAX, 2 * 3 * 5, 2, {"n"}),
        (SOFTMAX_BACKWARD, 2 * 3 * 5, 1, {"n"}),
    ],
)
def test_a_split_row_adds_up_one_or_two_fp32_numbers(
    call: tuple[Any, tuple[Any, ...], tuple[TensorSpec, ...]], rows: int, numbers: int, names: set[str]
) -> None:
    target, arguments, outputs = call
    rule = rule_of(Call(target, arguments, (), outputs))
    assert rule is not None
    assert rule.synchronised_bytes == dict.fromkeys(names, 4 * numbers * rows)
