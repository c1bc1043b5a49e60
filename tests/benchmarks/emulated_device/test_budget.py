"""Bytes of an emulated device and of its host, counted apart and bounded."""

from __future__ import annotations

import gc

import pytest
import torch

from autopar.ops.host_copies import copy_from_host, copy_to_host, wait_copy
from benchmarks.emulated_device.budget import Budget, OutOfMemory

CPU = torch.device("cpu")
KB = 1000


def kilobyte() -> torch.Tensor:
    return torch.ones(250)


def test_storages_count_once_from_their_birth_to_their_end() -> None:
    weight = kilobyte()
    with Budget(known=[weight]) as budget:
        assert budget.live_bytes == KB
        x = weight * 2
        y = x.view(25, 10)[3:]  # a view
        assert budget.live_bytes == 2 * KB
        del x
        assert budget.live_bytes == 2 * KB
        del y
        assert budget.live_bytes == KB
    assert budget.peak_bytes == 2 * KB


def test_what_lies_on_the_host_takes_nothing_of_the_device() -> None:
    with Budget() as budget:
        x = torch.ones(250)
        parked = wait_copy(copy_to_host(x), x)
        del x
        assert (budget.live_bytes, budget.host_live_bytes) == (0, KB)
        doubled = parked * 2  # computed by the host
        assert (budget.live_bytes, budget.host_live_bytes) == (0, 2 * KB)
        back = wait_copy(copy_from_host(parked, CPU), parked)
        del parked, doubled
        assert (budget.live_bytes, budget.host_live_bytes) == (KB, 0)
        del back
    assert (budget.peak_bytes, budget.host_peak_bytes) == (KB, 2 * KB)


def test_what_is_put_on_the_host_stays_there() -> None:
    state = kilobyte()
    with Budget(known=[state]) as budget:
        budget.on_host(state)
        state.mul_(2.0)
        grown = state + state
        state.copy_(torch.ones(250))  # from the device
    assert budget.host_peak_bytes == 2 * KB
    assert budget.peak_bytes == KB
    del grown


def test_a_value_without_room_is_an_error_that_says_what_is_short() -> None:
    weight = kilobyte()
    with Budget(device_bytes=2500, known=[weight]) as budget:
        x = weight * 2
        with pytest.raises(OutOfMemory, match=r"device out of memory: aten\.add\.Tensor takes 1,000 bytes where 2,000"):
            x + x
        gc.collect()
        del x
        assert budget.live_bytes == KB
        assert budget.peak_bytes == 2 * KB  # what did not fit was never there
        weight * 3


def test_the_memory_of_the_host_is_bounded_too() -> None:
    x = kilobyte()
    with Budget(host_bytes=KB, known=[x]):
        kept = copy_to_host(x)
        with pytest.raises(OutOfMemory, match="host out of memory"):
            copy_to_host(x)
        del kept
        copy_to_host(x)


def test_nothing_reads_both_sides_but_a_copy() -> None:
    x = kilobyte()
    with Budget(known=[x]):
        parked = copy_to_host(x)
        with pytest.raises(RuntimeError, match="values of the device and values of its host"):
            x + parked
        x * parked.sum()  # a number without dims goes anywhere
