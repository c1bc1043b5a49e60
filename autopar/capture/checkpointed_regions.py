"""Checkpointed regions draw the same numbers when backward computes them again.

    y = checkpoint(block, x)     forward: salts 4, 5, 6;  recomputed in backward: salts 4, 5, 6 again

torch restores the state of its generators for that. Here numbers depend on salts, so it is the count of salts that
goes back to where the region began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias
from unittest import mock

from torch.utils import checkpoint

Mark: TypeAlias = Callable[[], Callable[[], AbstractContextManager[Any]]]


class Salts:
    """Counts the call sites that draw; `mark` remembers the count for a region that runs again."""

    def __init__(self, first: int = 0) -> None:
        self.next = first

    def take(self) -> int:
        """The salt of the next call site."""
        self.next += 1
        return self.next - 1

    def mark(self) -> Callable[[], AbstractContextManager[None]]:
        """A context in which the count starts again from where it is now."""
        first = self.next

        @contextlib.contextmanager
        def replayed() -> Iterator[None]:
            last, self.next = self.next, first
            try:
                yield
            finally:
                self.next = last

        return replayed


@contextlib.contextmanager
def recomputed_within(mark: Mark) -> Iterator[None]:
    """While active, a checkpointed region calls `mark` when it begins and runs again inside the context that this
    returned. torch's generators are left alone."""
    original = checkpoint._checkpoint_without_reentrant_generator

    def generator(function: Callable[..., Any], preserve_rng_state: bool, *args: Any, **kwargs: Any) -> Any:
        context = mark()

        def again(*inner: Any, **options: Any) -> Any:
            with context():
                return function(*inner, **options)

        return original(again, False, *args, **kwargs)

    with (
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", generator),
        mock.patch.object(checkpoint, "CheckpointFunction", _WithoutReentrance),
    ):
        yield


class _WithoutReentrance:
    """Stands in for torch's reentrant function, which cannot run inside a trace: the same values, the other way."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False)
