"""Examples of a call are small, and in all that an operator may look at they are the call."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.rules.call import Call, TensorSpec
from autopar.rules.call_example import (
    MOST_ELEMENTS,
    MOST_WIDE,
    example_of,
    is_the_same_call,
    positional,
    scales,
    spread_beyond,
)

aten = torch.ops.aten


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, dtype)


def test_large_sizes_become_small_and_keep_order_and_equality() -> None:
    call = Call(aten.mm.default, (spec(8192, 4096), spec(4096, 8192)), (), (spec(8192, 8192),))
    scale, other = next(scales(call))
    assert scale[4096] < scale[8192] < 100
    assert all(size % parts == 0 for size in (*scale.values(), *other.values()) for parts in (2, 3))
    assert scale != other
    left, right = example_of(call, scale, 0)
    assert left.shape == (scale[8192], scale[4096])
    assert left.numel() + right.numel() < MOST_ELEMENTS
    assert is_the_same_call(call, scale, (left @ right,))


def test_an_integer_that_is_no_size_stays_and_sizes_stay_above_it() -> None:
    call = Call(aten.tril.default, (spec(64, 128), 100), (), (spec(64, 128),))
    scale, _ = next(scales(call))
    value, diagonal = example_of(call, scale, 0)
    assert diagonal == 100
    assert value.shape[0] == 64
    assert value.shape[1] > 100


def test_results_of_another_shape_are_no_example() -> None:
    call = Call(aten.relu.default, (spec(64, 32),), (), (spec(64, 32),))
    scale, _ = next(scales(call))
    (value,) = example_of(call, scale, 0)
    assert is_the_same_call(call, scale, (value,))
    assert not is_the_same_call(call, scale, (value.mT,))
    assert not is_the_same_call(call, scale, (value, value))
    assert not is_the_same_call(call, scale, (value.double(),))


def test_floats_are_distinct_of_both_signs_and_integers_are_positions() -> None:
    call = Call(aten.index_select.default, (spec(40, 30), 0, spec(30, dtype=torch.int64)), (), (spec(30, 30),))
    scale, _ = next(scales(call))
    value, _, index = example_of(call, scale, 0)
    assert torch.unique(value).numel() == value.numel()
    assert bool((value > 0).any())
    assert bool((value < 0).any())
    assert int(index.max()) < value.shape[0]


def test_half_precision_is_tried_in_single_precision() -> None:
    call = Call(aten.relu.default, (spec(64, 32, dtype=torch.bfloat16),), (), (spec(64, 32, dtype=torch.bfloat16),))
    scale, _ = next(scales(call))
    (value,) = example_of(call, scale, 0)
    assert value.dtype == torch.float32
    assert is_the_same_call(call, scale, (value,))


def test_wide_values_lie_beyond_every_number_of_the_call() -> None:
    def filled(value: float) -> Call:
        return Call(aten.masked_fill.Scalar, (spec(12, 6), spec(12, 6, dtype=torch.bool), value), (), (spec(12, 6),))

    def largest(value: Tensor) -> float:
        return float(value.abs().max())

    call = filled(-1e9)
    values, _, _ = example_of(call, {}, 0, spread_beyond(call))
    assert largest(values) > 1e9
    assert spread_beyond(filled(float("-inf"))) < spread_beyond(filled(-1e9))
    assert spread_beyond(filled(-3e38)) == MOST_WIDE


def test_keyword_arguments_are_given_by_position() -> None:
    dtypes = (("dtype", torch.float64),)
    call = Call(aten.sum.dim_IntList, (spec(12, 6), (1,)), dtypes, (spec(12, dtype=torch.float64),))
    (value, dims, dtype) = example_of(call, {}, 0)
    assert positional(call)(value, dims, dtype).dtype == torch.float64
