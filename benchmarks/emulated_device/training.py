"""A plan that trains on the emulated device: its seconds, its bytes, what its copies hide."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

import autopar
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parallel_module import ParallelModule
from benchmarks.emulated_device.device import EmulatedDevice
from benchmarks.emulated_device.settings import Inputs, Model, link

LEARNING_RATE = 1e-3


@dataclass(slots=True)
class Trained:
    """seconds: of every step; overlap: of copies, and stalled seconds, of every step in which something was copied."""

    plan: Plan
    rate: float
    module: ParallelModule
    inputs: Inputs
    seconds: list[float] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)

    @staticmethod
    def of(plan: Plan, model: Model, rate: float, layers: int | None = None) -> Trained:
        """Compiled, and one step made."""
        module, inputs = model.made(layers)
        found = Trained(plan, rate, autopar.compile(module, inputs, plan=plan), inputs)
        found.step()
        found.seconds.clear()
        found.overlap.clear()
        return found

    def step(self) -> None:
        """One more, timed."""
        with EmulatedDevice(link(self.rate), counts=False) as device:
            began = time.perf_counter()
            self._train()
            self.seconds.append(time.perf_counter() - began)
        if device.link.copies:
            self.overlap.append(device.link.overlap)

    def peak_bytes(self, limit: int | None = None) -> tuple[int, int]:
        """(of the device, of the host) in a step. Raises OutOfMemory where the device has no more than `limit`."""
        here, there = self._parameters("device"), self._parameters("host")
        with EmulatedDevice(link(self.rate), device_bytes=limit, known=[*here, *self.inputs.values()]) as device:
            device.budget.on_host(*there)
            self._train()
        return device.budget.peak_bytes, device.budget.host_peak_bytes

    def _parameters(self, memory: str) -> list[Tensor]:
        stored = self.plan.parameters
        return [self.module.get_parameter(name) for name, each in stored.items() if each.stored_on == memory]

    def _train(self) -> None:
        loss = self.module(**self.inputs)
        loss.backward()
        del loss
        optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE, foreach=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def fastest_seconds(self) -> float:
        return min(self.seconds)


def in_turn(trained: Mapping[str, Trained], rounds: int) -> None:
    """Steps of all, one after the other, so that what disturbs the machine disturbs all of them."""
    for _ in range(rounds):
        for each in trained.values():
            each.step()
