"""Which tensors follow from which: labels that travel through the operators of a run.

    with Labels() as labels:
        labels.mark(x, "x")
        labels.of(x[0] + 1)             {"x"}
        labels.of(torch.zeros_like(x))  none: it reads no value of x
        labels.of(torch.rand(3))        {"a draw"}

A label belongs to the memory of a tensor: views have it too, and what is written into in place takes those of what is
written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._compat import OpOverload, tree_leaves
from autopar.capture.known_values import makes_values

DRAW = "a draw"


class Labels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module docstring."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labels: defaultdict[int, set[Any]] = defaultdict(set)
        self._kept: list[Tensor] = []  # so that no storage comes again

    def mark(self, value: Any, label: Any) -> None:
        """Give a label to all tensors in a structure."""
        for tensor in _tensors(value):
            self._add(tensor, {label})

    def of(self, value: Any) -> set[Any]:
        """The labels of all tensors in a structure."""
        return {label for tensor in _tensors(value) for label in self._labels.get(_memory(tensor), ())}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        found: set[Any] = set() if isinstance(func, OpOverload) and makes_values(func) else self.of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            found.add(DRAW)
        if found:
            for tensor in (*_tensors(result), *_written(func, args, kwargs)):
                self._add(tensor, found)
        return result

    def _add(self, tensor: Tensor, labels: set[Any]) -> None:
        self._labels[_memory(tensor)] |= labels
        self._kept.append(tensor)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors into which an operator writes."""
    if not isinstance(func, OpOverload):
        return []
    arguments = func._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    return _tensors([given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write])
