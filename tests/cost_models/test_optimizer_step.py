"""The temporaries of every optimizer of the table, against the storages that torch really makes."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from autopar.cost_models.optimizer_step import TEMPORARIES, step_buffer_bytes, temporaries_of
from benchmarks.storages import StorageTracker

SIZES = (1000, 50000, 70000, 3000, 100000, 20000)
SCALARS = 2000
"""Bytes of the scalars that some classes make."""


def _expected(name: str, device_kind: Literal["cuda", "cpu"]) -> float:
    return step_buffer_bytes([(4.0 * size, temporaries_of(name)) for size in SIZES], device_kind)


def _measured(name: str, foreach: bool) -> int:
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-3, foreach=foreach, **options)
    for _ in range(2):  # the first step makes the state
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        states = [value for state in optimizer.state.values() for value in state.values()]
        gradients = [parameter.grad for parameter in parameters]
        with StorageTracker([*parameters, *gradients, *filter(torch.is_tensor, states)]) as tracker:
            before = tracker.peak_bytes
            optimizer.step()
    return tracker.peak_bytes - before


@pytest.mark.parametrize("name", TEMPORARIES)
def test_loop_over_parameters(name: str) -> None:
    expected = _expected(name, "cpu")
    assert _measured(name, foreach=False) == pytest.approx(expected, abs=SCALARS)


@pytest.mark.parametrize("name", [name for name in TEMPORARIES if name != "Rprop"])
def test_all_parameters_at_once(name: str) -> None:
    expected = _expected(name, "cuda")
    assert _measured(name, foreach=True) == pytest.approx(expected, abs=SCALARS)


def test_other_counts_would_be_noticed() -> None:
    assert _measured("AdamW", foreach=False) > _expected("Adamax", "cpu")


def test_nothing_to_train() -> None:
    assert step_buffer_bytes([], "cpu") == 0.0


def test_an_8_bit_step_is_one_kernel() -> None:
    assert _expected("AdamW8bit", "cuda") == 0.0
