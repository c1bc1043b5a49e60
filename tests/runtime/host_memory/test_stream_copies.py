"""Copies on streams are awaited where they are read, and buffers that are used again are not overwritten early."""

from __future__ import annotations

import torch

from autopar.ops.host_copies import copies_by, copy_from_host, copy_to_host, wait_copy
from autopar.runtime.host_memory.pinned_pool import PinnedPool
from autopar.runtime.host_memory.stream_copies import StreamCopies
from tests.runtime.host_memory.memory import LateStreams, Pages

CPU = torch.device("cpu")


def engine() -> tuple[StreamCopies, LateStreams]:
    streams = LateStreams()
    return StreamCopies(PinnedPool(memory=Pages()), streams), streams


def test_a_value_is_there_from_its_wait_on_and_not_before() -> None:
    copies, streams = engine()
    x = torch.randn(40, 50)
    with copies_by("cpu", copies):
        parked = copy_to_host(x)
        assert not streams.started[0].ended
        parked = wait_copy(parked, x)
        assert torch.equal(parked, x)
        back = copy_from_host(parked, CPU)
        assert not streams.started[1].ended
        assert torch.equal(wait_copy(back, parked), x)
    assert [copy.direction for copy in streams.started] == ["to_host", "from_host"]


def test_a_copy_keeps_both_its_ends_until_it_is_awaited() -> None:
    copies, _ = engine()
    x = torch.randn(4000)
    with copies_by("cpu", copies):
        parked = copy_to_host(x * 1.0)
        torch.zeros(4000)  # would take the memory of a source that is gone
        assert torch.equal(wait_copy(parked, x), x)
        used = copies.pool.used_bytes
        back = copy_from_host(parked, CPU)
        del parked
        assert copies.pool.used_bytes == used
        wait_copy(back, x)
    assert copies.pool.used_bytes == 0


def test_a_buffer_that_is_used_again_is_written_behind_the_copy_that_still_reads_it() -> None:
    copies, streams = engine()
    x = torch.randn(1000)
    with copies_by("cpu", copies):
        for _ in range(2):
            parked = wait_copy(copy_to_host(x), x)
            back = wait_copy(copy_from_host(parked, CPU), parked)
            del parked
    first_out, first_back, second_out, _ = streams.started
    assert first_out.writes == second_out.writes
    assert second_out.after is first_back
    assert first_out.after is None
    assert torch.equal(back, x)


def test_the_host_reads_what_has_settled_and_the_device_may_still_wait_for_it() -> None:
    copies, streams = engine()
    x = torch.randn(10)
    with copies_by("cpu", copies):
        parked = copy_to_host(x)
        copies.settle(parked)
        assert streams.started[0].ended
        assert torch.equal(wait_copy(parked, x), x)
        wait_copy(parked, x)  # a second wait has nothing to wait for
        nothing = torch.empty(0)
        wait_copy(copy_to_host(nothing), nothing)
    assert len(streams.started) == 1
