"""Handed outputs: what a call gives back of a tensor of which each rank holds a block.

    loss                          plain, the same on all ranks
    logits, whole on each rank    plain
    logits, split                 a LazyOutput: gathered by all ranks when it is first read, at no cost where it is not
    logits, batch="local"         this rank's rows, plain where the plan has them so, else redistributed when first read

A LazyOutput answers its shape, dtype and device by itself. Whatever else is done with it is done with the value that
one device has, a plain tensor: `(out.logits.argmax(-1) == labels).float().mean()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autopar._compat import tree_map_only, without_torch_function
from autopar.layouts.placement import Layout, local_shape, replicated
from autopar.runtime.collectives.common_reads import read_together
from autopar.runtime.process_groups import ProcessGroups
from autopar.runtime.step.batches import exchange_block


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """An output, called `what` in messages. shape: of the whole; held: the layout of the blocks that a step returns;
    wanted: of what the user gets."""

    what: str
    shape: tuple[int, ...]
    held: Layout
    wanted: Layout
    groups: ProcessGroups

    def shape_in(self, layout: Layout) -> tuple[int, ...]:
        """Of this rank's block."""
        return tuple(local_shape(self.shape, layout, self.groups.mesh, self.groups.coordinate))

    def is_in_place(self, first: Layout, second: Layout) -> bool:
        """Whether every rank has the same block in both layouts: they differ in axes of one rank only."""
        sizes = self.groups.mesh.shape
        return all(size == 1 or a == b for size, a, b in zip(sizes, first, second, strict=True))

    def moved(self, block: torch.Tensor, before: Layout, after: Layout) -> torch.Tensor:
        """The block of another layout; a collective, differentiable."""
        return (
            block if self.is_in_place(before, after) else exchange_block(block, self.shape, before, after, self.groups)
        )

    @property
    def whole(self) -> Layout:
        """Of all of it on every rank."""
        return replicated(len(self.held))


def hand_out(block: torch.Tensor, handed: Handed, *, gathers: bool = False) -> torch.Tensor:
    """What the user gets for a block. gathers: now, and not when it is read."""
    if gathers:
        block = handed.moved(block, handed.held, handed.whole)
        handed = replace(handed, held=handed.whole, wanted=handed.whole)
    if not handed.is_in_place(handed.held, handed.wanted):
        return LazyOutput.of(Reading(handed, block))
    if handed.groups.mesh.size > 1:
        _handed[block] = handed
    return block


_handed: Any = WeakTensorKeyDictionary()
"""Of the plain tensors that were handed out."""


def is_handed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an output as it was handed out."""
    return isinstance(tensor, LazyOutput) or tensor in _handed


def whole_output(tensor: torch.Tensor) -> torch.Tensor:
    """All of an output on every rank; a collective. Another tensor comes back as it is."""
    if isinstance(tensor, LazyOutput):
        return tensor.full_tensor()
    handed = _handed.get(tensor)
    return tensor if handed is None else handed.moved(tensor, handed.wanted, handed.whole)


class Reading:
    """An output that is read when it is asked for, and once: again only where a gradient is wanted of a value that was
    read without one."""

    def __init__(self, handed: Handed, block: torch.Tensor) -> None:
        self.handed, self.block = handed, block
        self._value: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """What the user gets. Raises RankMismatchError where not all ranks read it."""
        if self._is_to_be_read():
            groups = self.handed.groups
            read_together(self.handed.what, groups.members(groups.group))
            self._value = self.handed.moved(self.block, self.handed.held, self.handed.wanted)
        assert self._value is not None
        return self._value

    def whole(self) -> torch.Tensor:
        """All of it on every rank."""
        handed = self.handed
        if not handed.is_in_place(handed.wanted, handed.whole):
            return handed.moved(self.block, handed.held, handed.whole)
        if self._is_to_be_read():
            self._value = handed.moved(self.block, handed.held, handed.whole)
        assert self._value is not None
        return self._value

    def _is_to_be_read(self) -> bool:
        if self._value is None:
            return True
        return self.block.requires_grad and torch.is_grad_enabled() and not self._value.requires_grad

    def text(self) -> str:
        """The value where it is there, else what it would be: printing on one rank is no collective."""
        if self._value is not None:
            return repr(self._value)
        shape, dtype = self.handed.shape_in(self.handed.wanted), self.block.dtype
        return f"LazyOutput({self.handed.what}, shape={shape}, dtype={dtype}, not read yet: module.full(...) reads it)"


class LazyOutput(torch.Tensor):
    """See the module docstring. reading: what it stands for; detached: without its gradient."""

    reading: Reading
    detached: bool

    @classmethod
    def of(cls, reading: Reading, *, detached: bool = False) -> LazyOutput:
        """That of a reading."""
        shape, block = reading.handed.shape_in(reading.handed.wanted), reading.block
        made: LazyOutput = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=block.dtype, device=block.device)
        made.reading, made.detached = reading, detached
        return made

    def read(self) -> torch.Tensor:
        """The value, a plain tensor."""
        if not self.detached:
            return self.reading()
        with torch.no_grad():
            return self.reading().detach()

    def full_tensor(self) -> torch.Tensor:
        """The whole value, as of a DTensor; a collective."""
        whole = self.reading.whole()
        return whole.detach() if self.detached else whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, LazyOutput):
            if func in _OF_BLOCK and not first.detached:
                return func(first.reading.block)
            if func in _OF_FORM:
                with without_torch_function():
                    return func(*args, **(kwargs or {}))
            if func is torch.Tensor.detach:
                return cls.of(first.reading, detached=True)
        read = tree_map_only(LazyOutput, LazyOutput.read, (args, dict(kwargs or {})))
        return func(*read[0], **read[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares what stands for none
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        read = tree_map_only(LazyOutput, LazyOutput.read, (args, dict(kwargs or {})))
        return func(*read[0], **read[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch gives it no types
        return self.reading.text()

    def __format__(self, spec: str) -> str:
        return format(self.reading.text(), spec)


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


_OF_BLOCK = _getters("requires_grad", "grad_fn", "is_leaf")
"""What the block answers."""
_OF_FORM: set[Any] = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu"),
    *_OF_BLOCK,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.Tensor.__hash__,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""What the output answers itself, without its value."""
