import math
import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from autopar.planner.solver import Edge, Problem, Status, check_certificate, mip, solve
from autopar.planner.solver.deadline import Deadline, StopSwitch, interruptible


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Python's own handler, also where the tests run in the background of a shell, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_ctrl_c(times: int = 1, after: float = 0.0) -> threading.Thread:
    def send() -> None:
        time.sleep(after)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_no_limit_leaves_for_ever_and_a_past_one_leaves_nothing() -> None:
    assert Deadline.after(None).left() == math.inf
    assert Deadline.after(0.0).left() == 0.0
    assert 9.0 < Deadline.after(10.0).left() <= 10.0


def test_seconds_of_the_process_do_not_pass_while_it_waits() -> None:
    deadline = Deadline.after(None, cpu_seconds=0.05)
    time.sleep(0.2)
    assert deadline.left() > 0.0
    while deadline.left() > 0.0:
        math.factorial(200)
    assert Deadline.after(0.0, cpu_seconds=10.0).left() == 0.0


def test_a_pressed_switch_leaves_no_time() -> None:
    deadline = Deadline.after(None)
    deadline.stop.press()
    assert deadline.left() == 0.0


def test_the_first_interrupt_ends_the_time_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible(Deadline.after(None)) as deadline:
        press_ctrl_c().join()
        assert deadline.left() == 0.0
        press_ctrl_c(after=0.1)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10.0)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_caller_stays() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with interruptible(Deadline.after(None)) as deadline:
            press_ctrl_c().join()
            assert deadline.left() == math.inf
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_another_thread_solves_without_a_handler() -> None:
    left: list[float] = []

    def work() -> None:
        with interruptible(Deadline.after(None)) as deadline:
            left.append(deadline.left())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert left == [math.inf]


def grid(side: int) -> Problem:
    """A grid of random costs: far too entangled to be closed in a test."""
    rng = np.random.default_rng(3)
    nodes = np.arange(side * side).reshape(side, side)
    pairs = [*zip(nodes[:, :-1].flat, nodes[:, 1:].flat, strict=True)]
    pairs += [*zip(nodes[:-1].flat, nodes[1:].flat, strict=True)]
    edges = tuple(Edge(source=int(u), target=int(v), costs=rng.random((8, 8))) for u, v in pairs)
    return Problem(node_costs=tuple(rng.random(8) for _ in range(side * side)), edges=edges)


def test_an_interrupted_solve_returns_its_best_plan_and_bound() -> None:
    problem = grid(30)
    sender = press_ctrl_c(after=0.5)
    solution = solve(problem, time_limit=60.0)
    sender.join()
    assert solution.status is Status.TIME_LIMIT
    assert 0.0 < solution.lower_bound < solution.objective
    check_certificate(problem, solution)


def test_an_interrupt_does_not_wait_for_highs() -> None:
    problem = grid(16)
    edges = [(edge.source, edge.target, edge.costs) for edge in problem.edges]
    with interruptible(Deadline.after(None)) as deadline:
        sender = press_ctrl_c(after=0.5)
        found = mip.solve_core(problem.node_costs, edges, time_limit=3.0, stop=deadline.stop)
        sender.join()
        assert deadline.stop.pressed
    assert found.labels is None
    assert found.bound == -np.inf


def test_without_a_stop_highs_is_waited_for() -> None:
    found = mip.solve_core([np.array([1.0, 2.0])], [], time_limit=5.0, stop=StopSwitch())
    assert found.labels is not None
    assert found.objective == 1.0
