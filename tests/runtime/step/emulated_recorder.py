"""A recorder of CPU tensors that behaves as CUDA graphs do, for tests: it stands where `CudaRecorder` stands.

    recorder = EmulatedRecorder()
    replay, results = recorder.record(lambda: (x * 2).sum(), recorder.pool())
    results                 # NaN: what is recorded has not run
    x.copy_(y); replay()    # every operator again, on the very tensors of the recording, into the very results

What reads a value on the host raises, as a stream that is captured does; draws on CPUs read numbers that are made of
none of the arguments, and on CUDA do not. A replay ends the results of what was recorded behind it in its pool.
Collectives over gloo are started and waited for in every replay anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.runtime.collectives import host_graphs
from autopar.runtime.collectives.host_collectives import Started

Result = TypeVar("Result")
COLLECTIVES = ("start_all_reduce", "start_all_reduce_in_place", "start_reduce_scatter", "start_all_gather",
               "start_all_to_all")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _View:
    """The result `leaf` of a call, a view or a collective on its way: made again in each replay, held by nobody."""

    call: int
    leaf: int


class _Operators(TorchDispatchMode):
    """Every operator: (operator, arguments, the tensors that it made)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, list[Tensor | None]]] = []
        self.constants: set[int] = set()
        self.views: dict[int, tuple[_View, Any]] = {}
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) if self.is_inside else self.noted(func, args, kwargs or {})

    def noting(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is noted as one operator, whatever it is made of."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.is_inside = True
            try:
                return self.noted(func, args, kwargs)
            finally:
                self.is_inside = False

        return run

    def noted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call, which replays make again."""
        arguments = (args, dict(kwargs))
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        storages = {_storage(leaf) for leaf in given}
        if storages <= self.constants and not self.is_inside:
            self.constants |= {_storage(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        elif any(not isinstance(leaf, Tensor | Started | None) for leaf in leaves):
            raise RuntimeError(f"operation not permitted when stream is capturing ({func})")
        made = [leaf if isinstance(leaf, Tensor) and _storage(leaf) not in storages else None for leaf in leaves]
        kept = tree_map_only((Tensor, Started), lambda value: self.views.get(id(value), (value,))[0], arguments)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor | Started) and made[place] is None and all(leaf is not one for one in given):
                self.views[id(leaf)] = (_View(len(self.calls), place), leaf)
        self.calls.append((func, kept, made))
        return result

    def replay(self) -> None:
        results: list[list[Any]] = []
        for func, kept, made in self.calls:
            args, kwargs = tree_map_only(_View, lambda view: results[view.call][view.leaf], kept)
            results.append(tree_leaves(func(*args, **kwargs)))
            for old, new in zip(made, results[-1], strict=True):
                if old is not None:
                    old.data.copy_(new)

    def end_results(self) -> None:
        """Their memory is another's: nothing has run."""
        for *_, made in self.calls:
            for tensor in made:
                if tensor is not None and tensor.is_floating_point():
                    tensor.data.fill_(torch.nan)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


Pool: TypeAlias = list["weakref.ref[_Operators]"]
"""What was recorded in one, in its order."""


class EmulatedRecorder:
    """See the module docstring. recorded, replayed, warmed: how often."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.recorded = self.replayed = self.warmed = 0

    def warm_up(self, call: Callable[[], Result]) -> Result:
        """Run it."""
        self.warmed += 1
        return call()

    def pool(self) -> Pool:
        """As of a Recorder."""
        return []

    def record(self, call: Callable[[], Result], pool: Pool) -> tuple[Callable[[], None], Result]:
        """As of a Recorder."""
        with _Operators() as operators, pytest.MonkeyPatch.context() as patch:
            for name in COLLECTIVES:
                patch.setattr(host_graphs, name, operators.noting(getattr(host_graphs, name)))
            patch.setattr(Started, "wait", operators.noting(Started.wait))
            results = call()
        operators.views.clear()
        operators.end_results()
        later = len(pool) + 1
        pool.append(weakref.ref(operators))
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad():
                operators.replay()
                for other in filter(None, (reference() for reference in pool[later:])):
                    other.end_results()

        return replay, results
