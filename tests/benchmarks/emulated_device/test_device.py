"""A step whose saved values wait on the host: same gradients, a lower peak, copies beside the computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.hardware.hosts import HostLink
from autopar.ops.host_copies import copy_from_host, copy_to_host, wait_copy
from benchmarks.emulated_device.budget import OutOfMemory
from benchmarks.emulated_device.device import EmulatedDevice

LAYERS, WIDTH, ROWS = 16, 64, 512
VALUE = ROWS * WIDTH * 4
LINK = HostLink(name="link", latency_seconds=1e-5, to_host_bytes_per_second=500e6, from_host_bytes_per_second=500e6,
                both_bytes_per_second=1e9)  # fmt: skip


class Shelf:
    """Values on their way to the host, or there."""

    def __init__(self) -> None:
        self.parked: list[Tensor] = []
        self.leaving: Tensor | None = None

    def put(self, value: Tensor) -> int:
        """Its place; the value put before has left from here on."""
        self.settle()
        self.parked.append(copy_to_host(value))
        self.leaving = value
        return len(self.parked) - 1

    def settle(self) -> None:
        if self.leaving is not None:
            self.parked[-1] = wait_copy(self.parked[-1], self.leaving)
            self.leaving = None

    def take(self, place: int) -> Tensor:
        self.settle()
        parked = self.parked[place]
        return wait_copy(copy_from_host(parked, torch.device("cpu")), parked)


class Parked(torch.autograd.Function):
    """tanh of a product, whose input and output wait on the host; the copy runs beside the next layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shelf: Shelf) -> Tensor:
        y = torch.tanh(x @ weight)
        ctx.shelf, ctx.place = shelf, shelf.put(y)
        ctx.save_for_backward(weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        y, x = ctx.shelf.take(ctx.place), ctx.shelf.take(ctx.place - 1)
        inner = grad * (1 - y * y)
        return inner @ weight.t(), x.t() @ inner, None


def step(weights: list[Tensor], x: Tensor, parks: bool) -> list[Tensor]:
    shelf = Shelf()
    if parks:
        shelf.put(x)
    for weight in weights:
        x = Parked.apply(x, weight, shelf) if parks else torch.tanh(x @ weight)  # type: ignore[no-untyped-call]
    x.sum().backward()
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    return [grad for grad in found if grad is not None]


def model() -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator).div_(12).requires_grad_() for _ in range(LAYERS)]
    return weights, torch.randn(ROWS, WIDTH, generator=generator)


def test_values_on_the_host_lower_the_peak_and_leave_the_gradients() -> None:
    weights, x = model()
    with EmulatedDevice(LINK, known=[*weights, x]) as plain:
        expected = step(weights, x, parks=False)
    with EmulatedDevice(LINK, known=[*weights, x]) as device:
        found = step(weights, x, parks=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert plain.budget.peak_bytes - device.budget.peak_bytes > 0.5 * LAYERS * VALUE
    assert device.budget.host_peak_bytes == (LAYERS + 1) * VALUE
    assert device.link.bytes_copied("to_host") == (LAYERS + 1) * VALUE
    limit = (plain.budget.peak_bytes + device.budget.peak_bytes) // 2
    with pytest.raises(OutOfMemory), EmulatedDevice(LINK, device_bytes=limit, known=[*weights, x]):
        step(weights, x, parks=False)
    for weight in weights:
        weight.grad = None
    with EmulatedDevice(LINK, device_bytes=limit, known=[*weights, x]):
        step(weights, x, parks=True)
