"""Copies to the host and back, started and awaited apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.ops.host_copies import PlainCopies, copies_by, copy_from_host, copy_to_host, wait_copy

CPU = torch.device("cpu")


def test_a_value_comes_back_as_it_was_with_its_strides() -> None:
    x = torch.randn(4, 5).t()
    parked = wait_copy(copy_to_host(x), x)
    back = wait_copy(copy_from_host(parked, CPU), parked)
    assert parked.stride() == back.stride() == x.stride()
    assert len({t.untyped_storage().data_ptr() for t in (x, parked, back)}) == 3
    assert torch.equal(back, x)


def test_a_wait_returns_what_was_copied_without_another_copy() -> None:
    x = torch.randn(3)
    parked = copy_to_host(x)
    assert wait_copy(parked, x).data_ptr() == parked.data_ptr()


def test_the_schemas_hold_on_fake_tensors() -> None:
    x = torch.randn(4, 5)
    torch.library.opcheck(torch.ops.autopar.copy_to_host.default, (x,))
    torch.library.opcheck(torch.ops.autopar.copy_from_host.default, (x, CPU))
    with FakeTensorMode():
        there = torch.empty(3, 2, device="cuda")
        parked = wait_copy(copy_to_host(there), there)
        back = wait_copy(copy_from_host(parked, torch.device("cuda", 0)), parked)
    assert (parked.device.type, back.device.type) == ("cpu", "cuda")
    parked = copy_to_host(torch.empty(2, device="meta"))
    assert parked.is_meta  # meta tensors have no other place: the bytes of a graph are counted with them
    assert copy_from_host(parked, torch.device("cuda", 0)).is_meta


class Recorder(PlainCopies):
    """Plain copies that say what was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def to_host(self, source: Tensor) -> Tensor:
        self.asked.append("to host")
        return super().to_host(source)

    def from_host(self, source: Tensor, device: torch.device) -> Tensor:
        self.asked.append("from host")
        return super().from_host(source, device)

    def wait(self, copied: Tensor) -> None:
        self.asked.append("wait")


def test_the_engine_of_the_kind_of_device_copies() -> None:
    x, engine, other = torch.randn(3), Recorder(), Recorder()
    with copies_by("cpu", engine), copies_by("cuda", other):
        parked = wait_copy(copy_to_host(x), x)
        wait_copy(copy_from_host(parked, CPU), parked)
    copy_to_host(x)
    assert (engine.asked, other.asked) == (["to host", "wait", "from host", "wait"], [])
