"""On CUDA: values come back as they were, from pinned memory, and copies run beside the computation."""

from __future__ import annotations

import pytest
import torch

from autopar.ops.host_copies import copies_by, copy_from_host, copy_to_host, wait_copy
from autopar.runtime.host_memory.pinned_pool import PinnedPool
from autopar.runtime.host_memory.stream_copies import StreamCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_values_come_back_through_buffers_that_are_used_again() -> None:
    copies = StreamCopies(PinnedPool(256 << 20))
    with copies_by("cuda", copies):
        for round_number in range(20):
            values = [torch.full((1 << 20,), float(round_number * 10 + i), device="cuda") for i in range(4)]
            parked = [copy_to_host(value) for value in values]
            product = torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
            parked = [wait_copy(there, value) for there, value in zip(parked, values, strict=True)]
            assert all(there.is_pinned() for there in parked)
            del values
            back = [copy_from_host(there, product.device) for there in parked]
            back = [wait_copy(value, there) for value, there in zip(back, parked, strict=True)]
            del parked
            assert [float(value.mean()) for value in back] == [float(round_number * 10 + i) for i in range(4)]
    assert copies.pool.used_bytes == 0
    assert copies.pool.held_bytes == copies.pool.peak_bytes == 4 << 22
    copies.pool.clear()
