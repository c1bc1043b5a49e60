"""When a checkpointer saves, and what it refuses, on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConfigurationError
from autopar.runtime.checkpoints import checkpointer
from autopar.runtime.checkpoints.checkpointer import Checkpointer
from autopar.runtime.checkpoints.staged_copy import Arena
from tests.runtime.checkpoints.small_runs import compiled


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Writes:
    """In place of a process: nothing is written, and takes as long as it is told."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.is_busy, self.fails = False, ""

    def write(self, request: Any) -> None:
        self.requests.append(request)

    def failure(self) -> str:
        failed, self.fails = self.fails, ""
        return failed

    def end(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(checkpointer, "time", found)
    monkeypatch.setattr(checkpointer, "WriterProcess", Writes)
    return found


def saver_of(path: Path, every: int | str) -> Checkpointer:
    module = compiled()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return autopar.Checkpointer(path, module, optimizer, every=every)


def test_an_interval_of_time_is_kept_with_few_looks(tmp_path: Path, clock: Clock) -> None:
    saver = saver_of(tmp_path / "run", "1min")
    looks, looked = [], saver._looked
    saver._looked = lambda: looks.append(clock.now) or looked()  # type: ignore[method-assign]
    began = []
    for _ in range(300):
        clock.now += 1.0
        if saver.step():
            began.append(clock.now - 100.0)
    saver.close()
    assert len(began) >= 4
    assert all(60.0 <= b - a <= 62.0 for a, b in zip([0.0, *began], began, strict=False))
    assert len(looks) < 50


def test_first_steps_that_seem_short_do_not_put_a_checkpoint_off(tmp_path: Path, clock: Clock) -> None:
    saver = saver_of(tmp_path / "run", "1min")
    for step in range(100):
        clock.now += 0.001 if step < 10 else 1.0
        if saver.step():
            break
    saver.close()
    assert clock.now - 100.0 < 75.0


def test_steps_are_counted_and_one_that_is_still_written_puts_the_next_off(tmp_path: Path, clock: Clock) -> None:
    saver = saver_of(tmp_path / "run", 3)
    assert [saver.step() for _ in range(6)] == [False, False, True] * 2
    saver._writer.is_busy = True  # type: ignore[union-attr,misc]
    assert [saver.step() for _ in range(5)] == [False] * 5
    saver._writer.is_busy = False  # type: ignore[union-attr,misc]
    assert [saver.step() for _ in range(4)] == [True, False, False, True]
    saver.close()


def test_what_was_not_written_is_an_error_of_the_next_one(tmp_path: Path, clock: Clock) -> None:
    saver = saver_of(tmp_path / "run", 1)
    saver.step()
    saver._writer.fails = "no space left"  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match=r"the checkpoint of step 1 was not written.*no space left"):
        saver.step()
    assert saver.step()
    saver.close()


@pytest.mark.parametrize("every", ["soon", "10", "0s", 0, True, -3, "5 days"])
def test_what_is_no_interval_is_refused(tmp_path: Path, every: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no interval: write a number of steps, or a time"):
        saver_of(tmp_path / "run", every)


def test_a_system_that_starts_no_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match=r"no process can be started .*No such file.*or use autopar\.save"):
        saver_of(tmp_path / "run", 1).step()


def test_memory_of_the_copy_has_no_name_and_goes_with_who_maps_it() -> None:
    arena = Arena(1 << 16)
    found = torch.from_file(arena.path, shared=True, size=arena.nbytes, dtype=torch.uint8)
    torch.from_file(arena.path, shared=True, size=arena.nbytes, dtype=torch.uint8).fill_(7)
    assert found.eq(7).all()
    assert Path(arena.path).resolve().name.endswith("(deleted)")
    path = arena.path
    del arena
    assert not Path(path).exists()
    assert found.eq(7).all()
