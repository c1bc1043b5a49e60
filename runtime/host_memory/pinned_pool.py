"""Pinned memory of the host: one pool with a budget, whose buffers serve every step again.

    pool = PinnedPool(budget_bytes=64 << 30)
    x = pool.take(like)            # a tensor of pinned memory with the strides of `like`
    del x                          # its buffer is free for the next tensor of that size

To pin memory takes milliseconds, so buffers are kept: a step takes the same sizes as the one before. Sizes are those of
the tensors, rounded up to pages (torch's own allocator of pinned memory rounds up to powers of two). A copy may still
read a buffer whose tensor is gone: `last_copy` is what the next copy into it has to wait for.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.errors import HostMemoryError

PAGE_BYTES = mmap.PAGESIZE


class CopyEvent(Protocol):
    """The end of a copy."""

    def synchronize(self) -> None:
        """Block until then."""


class Memory(Protocol):
    """Where a pool takes its memory from."""

    def allocate(self, nbytes: int) -> mmap.mmap:
        """So many bytes, whole pages."""

    def release(self, memory: mmap.mmap) -> None:
        """Nothing copies there any more."""


class PinnedMemory:
    """Pages of this process that are registered with CUDA."""

    def allocate(self, nbytes: int) -> mmap.mmap:
        """New pages."""
        memory = mmap.mmap(-1, nbytes)
        torch.cuda.check_error(_cuda().cudaHostRegister(_address(memory), nbytes, 0))
        return memory

    def release(self, memory: mmap.mmap) -> None:
        """Unregister; the pages go with their last reader."""
        torch.cuda.check_error(_cuda().cudaHostUnregister(_address(memory)))


class Buffer:
    """Memory of the pool, and the last copy that reads it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.last_copy: CopyEvent | None = None


class PinnedPool:
    """See the module docstring. budget_bytes: what it may pin at once; None: anything."""

    def __init__(self, budget_bytes: int | None = None, memory: Memory | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        """Pinned, whether a tensor lies there or not."""
        self.used_bytes = 0
        """Under tensors."""
        self.peak_bytes = 0
        """Most that was under tensors."""
        self._memory = memory or PinnedMemory()
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._used: dict[int, tuple[Buffer, weakref.ref[Any]]] = {}
        self._lock = threading.RLock()  # a tensor may end in any thread

    def take(self, like: Tensor) -> Tensor:
        """A tensor of pinned memory with the shape, dtype and strides of a dense one.

        Raises HostMemoryError where the budget has no room for it.
        """
        sizes = torch.empty_like(like, device="meta")
        count = sizes.numel()
        if not count:
            return torch.empty_like(like, device="cpu")
        with self._lock:
            buffer = self._buffer(-(-count * like.element_size() // PAGE_BYTES) * PAGE_BYTES)
            flat = torch.frombuffer(buffer.memory, dtype=like.dtype, count=count)
            storage = flat.untyped_storage()
            key = int(storage._cdata)
            self._used[key] = buffer, weakref.ref(storage, lambda _: self._give_back(key))
            self.used_bytes += len(buffer.memory)
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return flat.as_strided(sizes.shape, sizes.stride())

    def buffer_of(self, tensor: Tensor) -> Buffer | None:
        """The buffer in which a tensor lies; None for memory of others."""
        held = self._used.get(int(tensor.untyped_storage()._cdata))
        return None if held is None else held[0]

    def clear(self) -> None:
        """Give all memory back that no tensor uses."""
        with self._lock:
            while self._drop_one():
                pass

    def _buffer(self, nbytes: int) -> Buffer:
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        budget = self.budget_bytes
        while budget is not None and self.held_bytes + nbytes > budget and self._drop_one():
            pass
        if budget is not None and self.held_bytes + nbytes > budget:
            raise HostMemoryError(
                f"no room on the host: {nbytes:,} bytes beside {self.used_bytes:,} in use, of a budget of {budget:,}; "
                "plan with less host memory, or raise the budget"
            )
        buffer = Buffer(self._memory.allocate(nbytes))
        self.held_bytes += nbytes
        return buffer

    def _drop_one(self) -> bool:
        """Release the largest free buffer; False where there is none."""
        size = max((size for size, buffers in self._free.items() if buffers), default=None)
        if size is None:
            return False
        buffer = self._free[size].pop()
        if buffer.last_copy is not None:
            buffer.last_copy.synchronize()
        self._memory.release(buffer.memory)
        self.held_bytes -= size
        return True

    def _give_back(self, key: int) -> None:
        with self._lock:
            buffer, _ = self._used.pop(key)
            self.used_bytes -= len(buffer.memory)
            self._free[len(buffer.memory)].append(buffer)


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
