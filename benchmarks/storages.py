"""The bytes that live while code runs: every storage that an operator makes, from its birth to its end.

    with StorageTracker(model.parameters()) as tracker:
        step()
    tracker.peak_bytes          # most bytes at any operator, parameters and what existed before included

Storages are counted once, however many views there are. What an operator allocates and frees inside is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages while it is active; `known` holds tensors that live before it starts."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bytes: dict[int, int] = {}
        self._live = 0
        self.peak_bytes = 0
        for tensor in known:
            self._count(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = local(tensor).untyped_storage()
        key = id(storage)  # torch keeps the Python object of a storage as long as the storage
        if key in self._bytes:
            return
        self._bytes[key] = storage.nbytes()
        self._live += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live -= self._bytes.pop(key, 0)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, else the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
