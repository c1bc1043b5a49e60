"""What a forward does, as a list of operator calls: run on fake tensors, nothing is computed or traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._compat import tree_leaves

Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""An operator, and its arguments in order: the sizes of a tensor, an int as it is, anything else as text."""


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the mode, every operator is noted in `calls`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "prim":  # a look at a device
            return func(*args, **(kwargs or {}))
        arguments: list[Any] = []
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                arguments += [str(leaf.dtype), *leaf.shape]
            else:
                arguments.append(leaf if type(leaf) is int else repr(leaf))
        self.calls.append((str(func), tuple(arguments)))
        return func(*args, **(kwargs or {}))


def resized(tensors: tuple[Tensor, ...], shapes: Any) -> tuple[Tensor, ...]:
    """Tensors on meta of the given shapes with the dtypes of `tensors`."""
    return tuple(
        torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
        for tensor, shape in zip(tensors, shapes, strict=True)
    )
