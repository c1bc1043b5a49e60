"""One pool of pinned memory: exact bytes, a budget, buffers that are used again."""

from __future__ import annotations

import gc

import pytest
import torch

from autopar.errors import AutoparError, HostMemoryError
from autopar.runtime.host_memory.pinned_pool import PAGE_BYTES, PinnedPool
from tests.runtime.host_memory.memory import LateCopy, Pages

PAGE = torch.empty(PAGE_BYTES, dtype=torch.uint8)
TWO = torch.empty(PAGE_BYTES // 2 + 1, dtype=torch.float32)
"""Three pages, as bytes are rounded up to pages."""


def test_a_tensor_has_the_shape_and_strides_of_its_like_and_whole_pages() -> None:
    pool = PinnedPool(memory=Pages())
    like = torch.empty(3, 5, dtype=torch.bfloat16).t()
    taken = pool.take(like)
    assert (taken.shape, taken.stride(), taken.dtype) == (like.shape, like.stride(), like.dtype)
    assert pool.used_bytes == pool.held_bytes == PAGE_BYTES
    assert pool.buffer_of(taken[1:]) is not None
    assert pool.buffer_of(like) is None
    assert pool.take(torch.empty(0, 4)).shape == (0, 4)
    assert pool.take(TWO).shape == TWO.shape
    assert pool.peak_bytes == 4 * PAGE_BYTES


def test_a_buffer_serves_the_next_tensor_of_its_size_once_its_own_is_gone() -> None:
    pages = Pages()
    pool = PinnedPool(memory=pages)
    first, second = pool.take(PAGE), pool.take(PAGE)
    kept = first[10:]
    del first
    assert pool.used_bytes == 2 * PAGE_BYTES  # a view keeps it
    del kept
    assert (pool.used_bytes, pool.held_bytes) == (PAGE_BYTES, 2 * PAGE_BYTES)
    third = pool.take(PAGE)
    assert pages.allocated == [PAGE_BYTES] * 2
    assert third.data_ptr() != second.data_ptr()


def test_free_buffers_make_room_and_what_has_none_is_an_error_with_numbers() -> None:
    pages = Pages()
    pool = PinnedPool(3 * PAGE_BYTES, memory=pages)
    kept, freed = pool.take(PAGE), pool.take(PAGE)
    buffer = pool.buffer_of(freed)
    assert buffer is not None
    ends = torch.zeros(1), torch.ones(1)
    late = LateCopy(*ends, "from_host", None, None)
    buffer.last_copy = late
    del freed, buffer
    gc.collect()
    with pytest.raises(HostMemoryError, match=r"12,288 bytes beside 4,096 in use, of a budget of 12,288"):
        pool.take(TWO)
    assert late.ended  # nothing is unpinned under a copy
    assert pages.released == [PAGE_BYTES]
    assert issubclass(HostMemoryError, AutoparError)
    del kept
    pool.take(TWO)
    assert pages.released == [PAGE_BYTES] * 2
    pool.clear()
    assert pool.held_bytes == 0
