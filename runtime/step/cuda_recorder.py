"""CUDA recorder: the kernels of a call, recorded once and launched again as one CUDA graph.

    recorder = CudaRecorder()
    recorder.warm_up(call)                            # runs; what a first call compiles is there behind it
    pool = recorder.pool()
    replay, results = recorder.record(call, pool)     # runs no kernel: `results` lie where each replay writes them
    replay()                                          # reads the tensors that `call` read, at their addresses

The graphs of one pool share its memory: what one holds between its replays may lie where an earlier recorded one
computes, so a replay ends all results of those that were recorded behind it. Graphs are warmed up and recorded on one
stream, and replayed on that of the caller. Other threads go on calling CUDA meanwhile (NCCL's watchdog asks for
events, loaders pin memory), so that only calls of the recording thread are refused: torch's "thread_local". A
collective of NCCL is recorded where it starts and is waited for in one graph (pytorch issue 192000); torch's watchdog
does not see it then (pytorch PR 103503), and it must be recorded on all of its ranks or on none (NCCL's user guide).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Recorder(Protocol):
    """What records and replays. device_type: of the tensors that it can."""

    device_type: str

    def warm_up(self, call: Callable[[], Result]) -> Result:
        """Run a call that is going to be recorded."""

    def pool(self) -> Any:
        """New memory for graphs to share."""

    def record(self, call: Callable[[], Result], pool: Any) -> tuple[Callable[[], None], Result]:
        """(replay, results) of a call. Raises RuntimeError where it does what cannot be recorded."""


class CudaRecorder:
    """See the module docstring."""

    device_type = "cuda"

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def pool(self) -> Any:
        """As of a Recorder."""
        return torch.cuda.graph_pool_handle()

    def warm_up(self, call: Callable[[], Result]) -> Result:
        """On the stream that records. Both streams wait for each other, so no tensor is reused while one reads it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = call()
        current.wait_stream(self._stream)
        return results

    def record(self, call: Callable[[], Result], pool: Any) -> tuple[Callable[[], None], Result]:
        """As of a Recorder."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            results = call()
        return graph.replay, results
