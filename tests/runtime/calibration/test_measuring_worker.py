"""What is timed runs as often as is said, in the company of a step, and its seconds are those of one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
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


def test_operators_of_the_census_take_turns_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs once behind the call that is not timed, and once a turn; who ran before it changes."""
    names, done = ("relu", "tanh", "add"), list[str]()
    turn = [Sample(name=name, work=1.0, call=partial(done.append, name)) for name in names]
    monkeypatch.setattr(measuring_worker, "rounds", lambda: iter([turn]))
    points = list(census_points(lambda: None, Effort(census_calls=(6, 6))))
    assert [point.name for point in points] == [f"census.{name}" for name in names]
    turns = [tuple(done[first : first + 3]) for first in range(0, len(done), 3)]
    assert len(turns) == 7
    assert turns[0] == names
    assert all(sorted(each) == sorted(names) for each in turns)
    assert len({before for before, after in itertools.pairwise(done) if after == "add"}) > 1


def test_seconds_of_the_census_are_medians_of_its_calls_in_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that compute for 1, 1 and 4 s, two operators in each, where half of the processor is somebody else's."""
    now, lengths = 0.0, iter([9.0, 1.0, 1.0, 4.0])

    def call() -> None:
        nonlocal now
        now += next(lengths)

    monkeypatch.setattr(measuring_worker.time, "thread_time", lambda: now)
    monkeypatch.setattr(measuring_worker, "rounds", lambda: iter([[Sample(name="mm", work=1.0, call=call, calls=2)]]))
    (point,) = census_points(lambda: None, Effort(census_calls=(3, 3)), crowd=2.0)
    assert point.seconds == 1.0 / 2 * 2.0


def test_a_crowd_is_what_passes_per_second_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that computes half of the time."""
    passed = iter(range(100))
    monkeypatch.setattr(measuring_worker.time, "perf_counter", lambda: float(next(passed)))
    cpu = iter([0.0, 2.5])
    monkeypatch.setattr(measuring_worker.time, "thread_time", lambda: next(cpu))
    assert crowd(3.0) == pytest.approx(4.0 / 2.5)
