"""Guards are counted: their own CPU time, once where they nest, without what they call back, and bytes sent."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch.distributed as dist

from benchmarks.faults import guard_cost
from benchmarks.faults.guard_cost import GUARDS, GuardCounter, Spent, cost_of, functions_of


def _burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _guards() -> ModuleType:
    module = ModuleType("autopar.made_up_guards")

    def inner() -> None:
        _burn(0.02)

    def outer(action: Callable[[], None]) -> None:
        module.inner()  # type: ignore[attr-defined]
        action()

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        _burn(0.01)
        yield
        _burn(0.01)

    for each in (inner, outer, around):
        each.__module__ = module.__name__
        setattr(module, each.__name__, each)
    return module


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> tuple[GuardCounter, ModuleType]:
    """Counts three made-up guards; torch is as before afterwards."""
    module = _guards()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for holder, names in ((guard_cost.c10d, guard_cost.COLLECTIVES), (dist, guard_cost.COLLECTIVES),
                          (dist.Store, guard_cost.STORED)):  # fmt: skip
        for name in names:
            monkeypatch.setattr(holder, name, getattr(holder, name))
    return GuardCounter([module.__name__]), module


def test_nested_guards_count_once_and_what_they_call_back_does_not(counter: tuple[GuardCounter, ModuleType]) -> None:
    counted, module = counter
    module.outer(lambda: _burn(0.2))
    assert list(counted.spent.calls) == [f"{module.__name__}._guards.<locals>.outer"]
    assert 0.02 <= sum(counted.spent.seconds.values()) < 0.1


def test_of_a_context_its_entry_and_its_end_count(counter: tuple[GuardCounter, ModuleType]) -> None:
    counted, module = counter
    with module.around():
        _burn(0.2)
    assert 0.02 <= sum(counted.spent.seconds.values()) < 0.1


def test_bytes_are_those_sent_inside(counter: tuple[GuardCounter, ModuleType]) -> None:
    counted, _ = counter
    store = dist.HashStore()
    store.set("outside", "x" * 1000)
    with counted.inside("guard"):
        store.set("inside", "12345")
    assert counted.spent.sent_bytes == len("inside") + 5


def test_shares_are_per_step_and_what_is_done_once_is_spread() -> None:
    once, running = Spent(), Spent()
    once.seconds["a"], once.sent_bytes = 2.0, 4000
    running.seconds["b"], running.sent_bytes = 0.01, 200
    found = cost_of(once, running, steps=10, step_seconds=1.0, step_bytes=1e6)
    assert found["cpu_share"] == pytest.approx(0.001 + 2.0 / guard_cost.RUN_STEPS)
    assert found["bytes_share"] == pytest.approx((20 + 4000 / guard_cost.RUN_STEPS) / 1e6)


def test_the_named_rooms_have_guards() -> None:
    assert len(functions_of(GUARDS)) > 10
