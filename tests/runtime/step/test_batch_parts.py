"""The parts of a batch, by hand: which samples count, and how outputs of the parts become those of the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autopar.program import Joined
from autopar.runtime.step.batch_parts import BatchParts, _in_order


def parts(count: int = 2, joined: Joined | None = None, inputs: tuple[Any, ...] = ()) -> BatchParts:
    micro = SimpleNamespace(count=count, joined={"out": joined}, program=SimpleNamespace(inputs=inputs))
    plan = SimpleNamespace(layout_mesh=SimpleNamespace(shape=(2,)))
    return BatchParts(micro=cast(Any, micro), plan=cast(Any, plan), groups=cast(Any, None))


def value(role: str, batch_dim: int | None, *shape: int) -> SimpleNamespace:
    return SimpleNamespace(role=role, batch_dim=batch_dim, shape=shape)


@pytest.mark.parametrize("dim", [0, 1])
def test_samples_come_back_in_the_order_of_the_batch(dim: int) -> None:
    batch = torch.arange(12).reshape(2, 2, 3)  # (piece, micro-batch, sample)
    arrived = batch.transpose(0, 1).reshape(12)
    shape = (1,) * dim + (12, 1)
    assert torch.equal(_in_order(arrived.reshape(shape), dim, 2, 2), torch.arange(12).reshape(shape))
    assert _in_order(arrived, 0, 2, 1) is arrived


@pytest.mark.parametrize("count", [1, 3])
def test_means_of_parts_are_scaled_in_their_dtype(count: int) -> None:
    values = [torch.full((2,), 4.0, dtype=torch.bfloat16) for _ in range(count)]
    found = parts(count, Joined(scale=0.5)).join(cast(Any, SimpleNamespace(name="out")), values, ())
    assert torch.equal(found, torch.full((2,), 2.0 * count, dtype=torch.bfloat16))


def test_only_inputs_that_have_samples_say_into_how_many_parts_they_go() -> None:
    table, weight = value("input", None, 3, 3), value("parameter", 0, 3, 3)
    assert parts(inputs=(table, weight, value("input", 1, 3, 4))).pieces((0,)) == 2
    assert parts(inputs=(table, weight, value("input", 0, 3, 4))).pieces((0,)) == 1
