"""CUDA tensors on a machine without: fake ones, that know shapes and dtypes and hold nothing.

    with fake_cuda():
        attend(torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="cuda"), ...)

Outside of autograd only: inside, a fake CUDA tensor aborts on a machine without CUDA. A CPU build of torch tries to
start CUDA in the Python bindings of a few methods; these go to their operators of aten instead, which do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from autopar._compat import FakeTensor, FakeTensorMode
from autopar.ops.capability import FAKE_CAPABILITY

_aten = torch.ops.aten


def _item(x: Tensor, index: Any) -> Tensor:
    """x[index]: numbers, slices, None, ... and tensors of indices."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    at = next(i for i, part in enumerate(parts) if part is Ellipsis)
    taken = sum(part is not None for part in parts) - 1
    parts[at : at + 1] = [slice(None)] * (x.dim() - taken)
    dim, indices = 0, []
    for part in parts:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, int):
            x = _aten.select(x, dim, part)
            continue
        elif isinstance(part, slice) and part != slice(None):
            x = _aten.slice(x, dim, part.start, part.stop, part.step or 1)
        indices.append(part if isinstance(part, Tensor) else None)
        dim += 1
    return _aten.index(x, indices) if any(part is not None for part in indices) else x


def _set_item(x: Tensor, index: Any, value: Any) -> None:
    """x[index] = value, of numbers and slices."""
    part = _item(x, index)
    (_aten.copy_ if isinstance(value, Tensor) else _aten.fill_)(part, value)


_FORMULAS = ("mish_backward", "silu_backward", "native_channel_shuffle")
"""Kernels of CUDA that a build without it replaces by formulas: other operators would be seen in their place."""


@cache
def _without_formulas() -> Any:
    """What says that CUDA has these kernels; nothing calls them, as fake tensors have no values."""

    def absent(*_: Any, **__: Any) -> Any:
        raise AssertionError("a fake tensor reached a kernel")

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _FORMULAS if torch.version.cuda is None else ():
        library.impl(name, absent, "CUDA")
    return library


_METHODS: Mapping[str, Any] = {
    "contiguous": lambda x, memory_format=torch.contiguous_format: _aten.contiguous(x, memory_format=memory_format),
    "copy_": lambda x, source, non_blocking=False: _aten.copy_(x, source, non_blocking),
    "__invert__": lambda x: _aten.bitwise_not(x),
    "__getitem__": _item,
    "__setitem__": _set_item,
}


@contextmanager
def fake_cuda() -> Iterator[None]:
    """While active, tensors are made fake, on whatever device they are asked for, and no gradients are recorded."""
    _without_formulas()
    with (
        FakeTensorMode(),
        torch.no_grad(),
        mock.patch.multiple(FakeTensor, create=True, **_METHODS),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=FAKE_CAPABILITY),
    ):
        yield
