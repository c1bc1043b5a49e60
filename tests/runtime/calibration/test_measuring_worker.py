"""What is timed runs as often as is said, with cold caches, and its seconds are those of one call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.calibration import measuring_worker
from autopar.runtime.calibration.measuring_worker import (
    MATMUL_ROWS,
    MEMORY_BYTES,
    OVERHEAD_CALLS,
    Effort,
    census_points,
    crowd,
    operator_points,
)
from autopar.runtime.calibration.product_census import Sample


class Adding(TorchDispatchMode):
    """Remembers the bytes of one operand of every addition."""

    def __init__(self) -> None:
        super().__init__()
        self.operand_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            assert args[0].shape == args[1].shape
            self.operand_bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_additions_have_the_bytes_that_their_points_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(call: Callable[[], object], window_seconds: float) -> float:
        call()
        return 1.0

    monkeypatch.setattr(measuring_worker, "_seconds_per_call", once)
    with Adding() as adding:
        points = list(operator_points(1, lambda: None, Effort()))
    assert adding.operand_bytes == [*MEMORY_BYTES, *[16] * OVERHEAD_CALLS]
    assert [(point.name, point.size) for point in points] == [
        *(("matmul", rows) for rows in MATMUL_ROWS),
        *(("add", size) for size in MEMORY_BYTES),
        ("overhead", 0),
    ]
    assert points[-1].seconds == pytest.approx(1.0 / OVERHEAD_CALLS)


def test_seconds_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 0.25

    monkeypatch.setattr(measuring_worker, "time", SimpleNamespace(perf_counter=lambda: now))
    assert measuring_worker._seconds_per_call(call, 1.0) == 0.25


def test_caches_are_cold_before_every_call_of_the_census(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def chill(light: Callable[[], object]) -> None:
        done.append("cold")
        light()

    sample = Sample(name="relu", work=1.0, call=lambda: done.append("relu"))
    monkeypatch.setattr(measuring_worker, "chiller", lambda: chill)
    monkeypatch.setattr(measuring_worker, "samples", lambda: iter([sample]))
    points = list(census_points(lambda: None, Effort(census_calls=(2, 2))))
    assert [point.size for point in points] == [1.0]
    assert done == ["relu", *["cold", "relu", "relu"] * 2]


def test_a_crowd_is_what_passes_per_second_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that computes half of the time."""
    passed = iter(range(100))
    monkeypatch.setattr(measuring_worker.time, "perf_counter", lambda: float(next(passed)))
    cpu = iter([0.0, 2.5])
    monkeypatch.setattr(measuring_worker.time, "thread_time", lambda: next(cpu))
    assert crowd(3.0) == pytest.approx(4.0 / 2.5)
