"""Point 12: a rank that is stopped, killed or fails, in every phase; one that is only slow.

The others are told to wait HEARTBEAT_SECONDS (`acting.py`); those that the fault does not stop must end soon, with the
rank in their error. The phases are met from outside: by the model's own code, by what autopar logs, by files.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import autopar
from benchmarks.faults.checkpoints import FILE_EVENTS
from benchmarks.faults.fault import Fault, Scene, fault, make_fault
from benchmarks.faults.victims import Bare, Net, backward, batch, compiled, expect_step, loss_of, sgd, train

SECONDS = 25.0
PHASES = ("capture", "planning", "lowering", "step", "between calls", "save", "load")
Blow = Callable[[], object]


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Struck(Net):
    """Its forward, which capture runs, strikes."""

    blow: Blow | None = None

    def between(self, hidden: Tensor) -> Tensor:
        if self.blow is not None:
            self.blow()
        return hidden


class _AtPhase(logging.Handler):
    """Strikes when a phase of autopar ends."""

    def __init__(self, name: str, blow: Blow) -> None:
        super().__init__(logging.DEBUG)
        self._name, self._blow = name, blow

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "phase", None) == self._name:
            self._blow()

    def handleError(self, record: logging.LogRecord) -> None:
        raise


def _strike_behind(phase: str, blow: Blow) -> None:
    logger = logging.getLogger("autopar.timing")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_AtPhase(phase, blow))


def _strike_at_files(folder: str, blow: Blow) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and folder in str(arguments[0]):
            blow()

    sys.addaudithook(hook)


def _strike_soon(blow: Blow) -> None:
    signal.signal(signal.SIGALRM, lambda number, frame: blow())
    signal.setitimer(signal.ITIMER_REAL, 0.15)


def _struck(phase: str, blow: Blow, victim: int, scene: Scene) -> None:
    """Train, save and load; the victim is struck in one phase."""
    strikes = scene.rank == victim
    model = Struck()
    if strikes and phase == "capture":
        model.blow = blow
    if strikes and phase in ("planning", "lowering"):
        _strike_behind({"planning": "capture", "lowering": "lower"}[phase], blow)
    module = compiled(scene, model, batch())
    optimizer = sgd(module.parameters())
    train(module, optimizer, [batch()])
    if strikes and phase == "step":
        _strike_soon(blow)
    if phase in ("step", "between calls"):
        for step in range(2000):
            if strikes and phase == "between calls" and step == 3:
                blow()
            train(module, optimizer, [batch(step)])
    where = scene.folder / "step"
    if strikes and phase == "save":
        _strike_at_files(str(where), blow)
    autopar.save(where, module, optimizer)
    if strikes and phase == "load":
        _strike_at_files(str(where), blow)
    autopar.load(where, module, optimizer)
    train(module, optimizer, [batch(1)] * 5)


BLOWS: Mapping[str, tuple[str, Blow]] = {"stopped": ("stopped for good", _stop), "killed": ("killed", _kill)}

LOST: tuple[Fault, ...] = tuple(
    make_fault(12, f"{name} in {phase} rank {victim}".replace(" ", "_"), f"rank {victim} is {does} in: {phase}",
               partial(_struck, phase, blow, victim), layout=layout, words=(f"rank[s]? .*{victim}",),
               culprits={victim}, seconds=SECONDS)
    for name, (does, blow) in BLOWS.items()
    for phase in PHASES
    for victim, layout in ((1, "shard2"), (0, "shard2"), (2, "shard4"))
    if victim < 2 or phase in ("planning", "step", "save", "between calls")
)  # fmt: skip


@fault(12, "a stage of a pipeline is stopped between calls", on=("pp2",), words=("rank[s]? .*1",), culprits={1},
       seconds=SECONDS)  # fmt: skip
def stopped_stage(scene: Scene) -> None:
    _struck("between calls", _stop, 1, scene)


def _raise(kind: type[BaseException]) -> Blow:
    def blow() -> None:
        raise kind("of the user's")

    return blow


def _failing(phase: str, kind: type[BaseException], victim: int, scene: Scene) -> None:
    _struck(phase, _raise(kind), victim, scene)


FAILING: tuple[Fault, ...] = tuple(
    make_fault(12, f"{kind.__name__.lower()} in {phase} rank {victim}".replace(" ", "_"),
               f"{kind.__name__} on rank {victim} in: {phase}", partial(_failing, phase, kind, victim),
               layout=layout, words=("step",) if (phase, victim) == ("save", 0) else (f"rank[s]? .*{victim}",),
               culprits={victim}, seconds=SECONDS)
    for phase, kind, victim, layout in (
        ("capture", KeyError, 1, "shard2"),
        ("capture", KeyError, 0, "shard2"),
        ("capture", MemoryError, 1, "dp4"),
        ("capture", SystemExit, 1, "shard2"),
        ("capture", KeyboardInterrupt, 1, "shard2"),
        ("planning", KeyError, 0, "shard2"),
        ("planning", KeyError, 1, "shard4"),
        ("lowering", ZeroDivisionError, 1, "shard2"),
        ("between calls", ValueError, 1, "shard2"),
        ("between calls", ValueError, 0, "tp4"),
        ("between calls", SystemExit, 1, "pp2"),
        ("save", OSError, 1, "shard2"),
        ("save", OSError, 0, "shard2"),
        ("load", OSError, 1, "shard2"),
    )
)  # fmt: skip


def _sleep() -> None:
    time.sleep(9.0)


def _sleep_once(done: list[int]) -> None:
    if not done:
        done.append(1)
        _sleep()


@fault(12, "rank 1 takes 9 s for its data, more than a heartbeat: it lives", on=("shard2",), right=True)
def slow_between_calls(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    for step in range(3):
        if step == 1 and scene.rank == 1:
            _sleep()
        expect_step(module, Net(), batch(step))


@fault(12, "rank 1 captures 9 s longer, more than a heartbeat: it lives", on=("shard2",), right=True)
def slow_in_capture(scene: Scene) -> None:
    model = Struck()
    model.blow = partial(_sleep_once, [] if scene.rank == 1 else [1])
    module = compiled(scene, model, batch())
    expect_step(module, Net(), batch())


@fault(12, "rank 0 plans 9 s longer, more than a heartbeat: it lives", on=("shard2",), right=True)
def slow_in_planning(scene: Scene) -> None:
    if scene.rank == 0:
        _strike_behind("capture", _sleep)
    expect_step(compiled(scene, Net(), batch()), Net(), batch())


@fault(12, "rank 1 writes its part of a checkpoint 9 s longer: it lives", on=("shard2",), right=True)
def slow_in_save(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    slept: list[int] = []
    if scene.rank == 1:
        _strike_at_files(str(scene.folder / "step"), partial(_sleep_once, slept))
    autopar.save(scene.folder / "step", module, sgd(module.parameters()))
    expect_step(module, Net(), batch())


@fault(12, "rank 1 computes 9 s in one call of C that holds Python's lock", on=("shard2",), right=True)
def busy_without_threads(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    expect_step(module, Net(), batch())
    if scene.rank == 1:
        end = time.monotonic() + 9.0
        while time.monotonic() < end:
            sum(range(20_000_000))
    expect_step(module, Net(), batch(1))


@fault(12, "rank 1 is stopped for 2 s, less than a heartbeat, and goes on", on=("shard2",), right=True)
def stopped_for_a_moment(scene: Scene) -> None:
    module = compiled(scene, Net(), batch())
    if scene.rank == 1 and not os.fork():
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    for step in range(200):
        backward(loss_of(module(**batch(step))))
        time.sleep(0.01)
    expect_step(module, Net(), batch())


@fault(12, "loss_fn fails on rank 1 in capture", on=("shard2",), words=("rank[s]? .*1",), culprits={1}, seconds=SECONDS)
def failing_loss(scene: Scene) -> None:
    def loss(output: Any, inputs: Any) -> torch.Tensor:
        if scene.rank == 1:
            raise IndexError("of the user's")
        value: torch.Tensor = output.pow(2).mean()
        return value

    compiled(scene, Bare(), {"x": batch()["x"]}, loss_fn=loss)


@fault(12, "the optimizer's factory fails on rank 0 in planning", on=("shard2",), words=("rank[s]? .*0|RuntimeError",),
       culprits={0}, seconds=SECONDS)  # fmt: skip
def failing_optimizer(scene: Scene) -> None:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        raise OverflowError("of the user's")

    compiled(scene, Net(), batch(), optimizer=factory)
    if scene.rank == 1:
        backward(loss_of(compiled(scene, Net(), batch())(**batch())))
