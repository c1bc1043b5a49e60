"""The threads of a heartbeat, on stores of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from autopar.errors import ConfigurationError, RankLostError
from autopar.runtime.collectives.progress import HERE, RankProgress
from autopar.runtime.guards import heartbeat
from autopar.runtime.guards.heartbeat import Heartbeat, heartbeat_seconds


@pytest.fixture(autouse=True)
def _told() -> Iterator[None]:
    """A verdict counts as raised at once, so that no process ends."""
    HERE.begin_watch(True)
    HERE.delivered.set()
    yield
    HERE.begin_watch(False)


def _until(condition: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_silent_rank_is_found_in_the_store() -> None:
    store = dist.HashStore()
    other = Heartbeat(store, 1, 2, 1000.0)
    other._say()
    beating = Heartbeat(store, 0, 2, 0.3)
    beating.start()
    assert _until(lambda: HERE.verdict is not None)
    beating.stop()
    assert isinstance(HERE.verdict, RankLostError)
    assert store.check([heartbeat.VERDICT_KEY])
    with pytest.raises(RankLostError, match="rank 1 is silent"), HERE.inside("call", 1):
        raise AssertionError("a phase was entered after the verdict")


def test_a_verdict_of_others_is_heard() -> None:
    store = dist.HashStore()
    store.set(heartbeat.VERDICT_KEY, '{"lost": true, "message": "rank 3 is silent"}')
    beating = Heartbeat(store, 0, 2, 1000.0)
    beating.start()
    with pytest.raises(RankLostError, match="rank 3 is silent"), HERE.inside("call", 1):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
    beating.stop()


def test_errors_that_no_transport_raised_stay() -> None:
    with pytest.raises(KeyError, match="mine"), RankProgress().inside("call", 1):
        raise KeyError("mine")


def test_a_store_that_does_not_answer_is_a_lost_rank() -> None:
    class Stopped(dist.HashStore):  # type: ignore[misc]
        def set(self, key: str, value: str) -> None:
            threading.Event().wait(5.0)

    beating = Heartbeat(Stopped(), 1, 2, 0.3)
    beating.start()
    assert _until(lambda: HERE.verdict is not None)
    assert "the job's store does not answer" in str(HERE.verdict)
    beating._stopped.set()


class Looks(threading.Event):
    """Of a thread that looks a hundred times, one right after the other."""

    left = 100

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_store_that_is_not_asked_is_not_blamed(rounds: int) -> None:
    beating = Heartbeat(dist.HashStore(), 0, 2, 1e-6)
    for _ in range(rounds):
        beating._round(0.0)
    beating._stopped = Looks()
    beating._watch_store()
    assert HERE.verdict is None


def test_a_forked_process_is_not_watched_and_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    beating = Heartbeat(dist.HashStore(), 0, 2, 1000.0)
    monkeypatch.setattr(heartbeat, "_beating", [beating])
    HERE.verdict = RankLostError("rank 3 is silent")
    heartbeat._forget()
    assert not HERE.watched
    with HERE.inside("call", 1):
        assert HERE.verdict is None
    heartbeat.stop_heartbeat()
    assert not beating.is_over, "the threads of the parent are not for a child to stop"


def test_who_leaves_says_so_and_its_threads_end() -> None:
    store = dist.HashStore()
    beating = Heartbeat(store, 0, 2, 1000.0)
    beating.start()
    beating.stop()
    assert not any(thread.is_alive() for thread in beating._threads)
    said = beating._ask(0)
    assert said is not None
    assert said.ended
    assert not HERE.watched


@pytest.mark.parametrize("given", ["soon", "-1", "inf", "nan"])
def test_seconds_that_cannot_be_meant_are_named(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(heartbeat.VARIABLE, given)
    with pytest.raises(ConfigurationError, match=f"AUTOPAR_HEARTBEAT='{given}'"):
        heartbeat_seconds()


def test_a_phase_inside_of_another_is_no_phase_of_its_own() -> None:
    here = RankProgress()
    with here.inside("call", 3):
        with here.inside("compile"):
            assert (here.place().phase, here.place().entries, here.place().number) == ("call", 1, 3)
        assert here.place().inside
    assert not here.place().inside
