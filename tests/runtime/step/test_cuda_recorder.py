"""What the recorder asks of torch.cuda: streams wait for each other, graphs share a pool and a stream."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autopar.runtime.step.cuda_recorder import CudaRecorder

SIGNATURE = inspect.signature(torch.cuda.graph)


class Stream:
    """Notes what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    user, side = Stream("user", lines), Stream("side", lines)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        lines.append(f"on {stream.name}")
        yield
        lines.append(f"off {stream.name}")

    @contextlib.contextmanager
    def captured(*args: Any, **kwargs: Any) -> Iterator[None]:
        given = SIGNATURE.bind(*args, **kwargs).arguments
        assert isinstance(given["cuda_graph"], Graph)
        lines.append(f"capture on {given['stream'].name} into {given['pool']}, {given['capture_error_mode']}")
        yield
        lines.append("end")

    fakes = {"Stream": lambda: side, "current_stream": lambda: user, "stream": on, "graph": captured}
    for name, fake in {**fakes, "CUDAGraph": Graph, "graph_pool_handle": lambda: "pool 1"}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return lines


def test_a_warm_up_runs_on_the_stream_that_records(log: list[str]) -> None:
    assert CudaRecorder().warm_up(lambda: log.append("call") or 3) == 3  # type: ignore[func-returns-value]
    assert log == ["side waits for user", "on side", "call", "off side", "user waits for side"]


def test_graphs_share_a_pool_and_calls_of_other_threads_are_allowed(log: list[str]) -> None:
    recorder = CudaRecorder()
    pool = recorder.pool()
    replay, result = recorder.record(lambda: log.append("call") or "result", pool)  # type: ignore[func-returns-value]
    recorder.record(lambda: None, pool)
    line = "capture on side into pool 1, thread_local"
    assert log == [line, "call", "end", line, "end"]
    assert result == "result"
    replay()
    assert replay.__self__.replays == 1  # type: ignore[attr-defined]
