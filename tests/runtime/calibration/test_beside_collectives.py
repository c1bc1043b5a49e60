import pytest
import torch

from autopar.runtime.calibration import beside_collectives
from autopar.runtime.calibration.beside_collectives import seconds_beside, slowdown_beside

PRODUCT, SLOWED, START = 1e-3, 1.5e-3, 2e-3
"""Seconds of a product alone, of one beside a collective on its way, and of what its start takes."""
ON_ITS_WAY = 4e-3


class Machine:
    """A clock that products and collectives move, in place of the real one; the other processes do the same."""

    group_name = "7"

    def __init__(self) -> None:
        self.now, self.landed = 0.0, 0.0

    def size(self) -> int:
        return 2

    def product(self, *_: torch.Tensor) -> None:
        self.now += SLOWED if self.now < self.landed else PRODUCT

    def start(self, *_: object) -> None:
        self.now += START
        self.landed = self.now + ON_ITS_WAY

    def wait(self, _: object) -> None:
        self.now, self.landed = max(self.now, self.landed), 0.0

    def add_up(self, tensor: torch.Tensor, op: object = None, group: object = None) -> None:
        if op is None:
            tensor *= 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(beside_collectives.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(beside_collectives.torch, "mm", made.product)
    monkeypatch.setattr(beside_collectives.host_graphs, "all_reduce", made.start)
    monkeypatch.setattr(beside_collectives.host_graphs, "wait", made.wait)
    monkeypatch.setattr(beside_collectives.dist, "barrier", lambda _: None)
    monkeypatch.setattr(beside_collectives.dist, "all_reduce", made.add_up)
    return made


def test_products_are_timed_while_a_collective_is_on_its_way(machine: Machine) -> None:
    assert slowdown_beside(machine, 1 << 20, seconds=ON_ITS_WAY) == pytest.approx(SLOWED / PRODUCT)


def test_what_is_left_of_a_hidden_collective_are_its_start_and_slower_products(machine: Machine) -> None:
    slower = 3 * (SLOWED - PRODUCT)  # the products that begin within 4 ms
    assert seconds_beside(machine, seconds=START + ON_ITS_WAY) == pytest.approx(START + slower)
