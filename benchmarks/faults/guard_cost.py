"""What the guards cost: CPU seconds inside of them, counted directly, and the bytes that they send.

    python -m benchmarks.faults --cost        # GPT-2 small, 4 samples of 64 tokens, on one process and on four

Every function of the rooms and modules in `GUARDS` is wrapped before compile. Time is that of its own thread, so
waiting costs nothing, and what a guard calls back into (`action()`) does not count. Bytes are those of collectives and
of the store while a guard is entered. A share is per step, with what compile spends spread over RUN_STEPS, against the
CPU seconds of the step on the same rank, and against the least that data parallelism must send.

The batch is small for the machine's sake: a larger one makes the step longer and the share smaller.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import autopar
from benchmarks.models import gpt2, token_inputs
from benchmarks.workers import Pool

GUARDS = (
    "autopar.runtime.guards",
    "autopar.runtime.launchers",
    "autopar.runtime.weights.initial_weights",
    "autopar.runtime.weights.replaced_parameters",
)
"""Rooms and modules of which every function is a guard."""

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "gather", "send", "isend", "barrier")
STORED = ("set", "compare_set", "append", "add")
MOST = 0.005
"""Of a step."""
RUN_STEPS = 1000
"""Over which what is done once is spread."""
BATCH, SEQUENCE, STEPS = 4, 64, 12
WORLDS = (1, 4)


@dataclass(slots=True)
class Spent:
    """Inside of guards: CPU seconds and calls by function, bytes sent."""

    seconds: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0

    def taken(self) -> Spent:
        """What was counted so far; counting begins anew."""
        found = Spent(Counter(self.seconds), Counter(self.calls), self.sent_bytes)
        self.seconds.clear()
        self.calls.clear()
        self.sent_bytes = 0
        return found


class GuardCounter:
    """Wraps the guards of this process, for good; `spent` is what they did; nested ones count once."""

    def __init__(self, names: Sequence[str] = GUARDS) -> None:
        self.spent = Spent()
        self._here = threading.local()
        wrapped = {id(each): (each, self._counted(each)) for each in functions_of(names)}
        for module in [m for n, m in sorted(sys.modules.items()) if n.split(".")[0] == "autopar"]:
            _exchange(module, wrapped)
        for holder in (c10d, dist):
            for name in COLLECTIVES:
                setattr(holder, name, self._measured(getattr(c10d, name), _tensor_bytes))
        for name in STORED:
            setattr(c10d.Store, name, self._measured(getattr(c10d.Store, name), _entry_bytes))

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Count the time of this thread, if no guard is entered yet."""
        if getattr(self._here, "entered", False):
            yield
            return
        self._here.entered = True
        self.spent.calls[name] += 1
        self._here.begin = time.thread_time()
        try:
            yield
        finally:
            self.spent.seconds[name] += time.thread_time() - self._here.begin
            self._here.entered = False

    def _outside(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """What a guard calls back into: its time is not the guard's."""

        @functools.wraps(action, updated=())
        def called(*args: Any, **kwargs: Any) -> Any:
            begin, before = time.thread_time(), getattr(self._here, "entered", False)
            self._here.entered = False
            kept = getattr(self._here, "begin", 0.0)
            try:
                return action(*args, **kwargs)
            finally:
                self._here.entered = before
                self._here.begin = kept + (time.thread_time() - begin)

        return called

    def _counted(self, guard: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{guard.__module__}.{guard.__qualname__}".removeprefix("autopar.runtime.")

        @functools.wraps(guard)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.inside(name):
                result = guard(*map(self._shielded, args), **{k: self._shielded(v) for k, v in kwargs.items()})
            if isinstance(result, contextlib._GeneratorContextManager):
                return self._around(name, result)
            return result

        return called

    def _shielded(self, value: Any) -> Any:
        return self._outside(value) if type(value) in (FunctionType, MethodType, functools.partial) else value

    @contextlib.contextmanager
    def _around(self, name: str, manager: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
        """Its entry and its end are a guard's, the block between is not."""
        with self.inside(name):
            value = manager.__enter__()
        try:
            yield value
        except BaseException as error:
            with self.inside(name):
                swallowed = manager.__exit__(type(error), error, error.__traceback__)
            if not swallowed:
                raise
        else:
            with self.inside(name):
                manager.__exit__(None, None, None)

    def _measured(self, send: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
        @functools.wraps(send)
        def called(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._here, "entered", False):
                self.spent.sent_bytes += size(*args, **kwargs)
            return send(*args, **kwargs)

        return called


def functions_of(names: Sequence[str]) -> list[Callable[..., Any]]:
    """Every function, and every function of every class, that the rooms and modules define."""
    found: list[Callable[..., Any]] = []
    for module in [each for name in names for each in _modules_of(name)]:
        for value in vars(module).values():
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                found.append(value)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                found += [each for each in vars(value).values() if isinstance(each, FunctionType)]
    return found


def _modules_of(name: str) -> list[ModuleType]:
    module = importlib.import_module(name)
    inside = pkgutil.iter_modules(module.__path__, f"{name}.") if hasattr(module, "__path__") else ()
    return [module, *(each for entry in inside for each in _modules_of(entry.name))]


def _exchange(holder: Any, wrapped: dict[int, tuple[Any, Any]]) -> None:
    """Put the wrapped functions in place of the guards, wherever a module or one of its classes holds them."""
    for name, value in list(vars(holder).items()):
        if id(value) in wrapped:
            setattr(holder, name, wrapped[id(value)][1])
        elif isinstance(value, type) and value.__module__ == getattr(holder, "__name__", None):
            _exchange(value, wrapped)


def _tensor_bytes(*args: Any, **kwargs: Any) -> int:
    """Of the largest tensor that is passed, once to every other rank."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    return max((t.numel() * t.element_size() for t in tensors), default=0) * max(0, dist.get_world_size() - 1)


def _entry_bytes(store: object, *entry: Any) -> int:
    return sum(len(each) if isinstance(each, str | bytes) else 8 for each in entry)


def measure(batch: int, sequence: int, steps: int) -> dict[str, Any]:
    """On every rank: a run of GPT-2 small with counted guards."""
    counter = GuardCounter()
    torch.manual_seed(0)
    model = gpt2(layers=12, width=768, heads=12, vocabulary=50257, positions=1024)
    inputs = token_inputs(50257)(batch, sequence)
    parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    world = dist.get_world_size()
    module = autopar.compile(
        model, inputs, optimizer=torch.optim.AdamW, dims={"dp_shard": world} if world > 1 else None, mode="fast"
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    _step(module, optimizer, inputs)
    once = counter.spent.taken()
    begin = time.process_time()
    for _ in range(steps):
        _step(module, optimizer, inputs)
    step_seconds = (time.process_time() - begin) / steps
    return cost_of(once, counter.spent.taken(), steps, step_seconds, 2 * (world - 1) / world * parameter_bytes)


def _step(module: Any, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
    optimizer.zero_grad()
    module(**inputs).loss.backward()
    optimizer.step()


def cost_of(once: Spent, running: Spent, steps: int, step_seconds: float, step_bytes: float) -> dict[str, Any]:
    """Shares of a step, and the functions that took most. once: until the first step has ended; step_bytes: what a
    step must send, 0 on one process."""
    seconds = sum(running.seconds.values()) / steps + sum(once.seconds.values()) / RUN_STEPS
    sent = running.sent_bytes / steps + once.sent_bytes / RUN_STEPS
    return {
        "step_cpu_seconds": step_seconds,
        "guard_cpu_seconds_a_step": seconds,
        "cpu_share": seconds / step_seconds,
        "step_bytes": step_bytes,
        "guard_bytes_a_step": sent,
        "bytes_share": sent / step_bytes if step_bytes else 0.0,
        "once": {"cpu_seconds": sum(once.seconds.values()), "bytes": once.sent_bytes, "calls": dict(once.calls)},
        "calls_a_step": {name: count / steps for name, count in running.calls.most_common()},
        "seconds_by_guard": dict(running.seconds.most_common(8)),
    }


def measured_cost(worlds: Sequence[int] = WORLDS) -> dict[str, Any]:
    """The cost on each number of processes, of the rank where the guards take the largest share."""
    found: dict[str, Any] = {"batch": BATCH, "sequence": SEQUENCE, "steps": STEPS, "run_steps": RUN_STEPS, "most": MOST}
    for world in worlds:
        with contextlib.closing(Pool(world)) as pool:
            ranks = pool.run(f"{__name__}:measure", world_size=world, timeout=600.0, batch=BATCH, sequence=SEQUENCE,
                             steps=STEPS)  # fmt: skip
        worst = max(ranks, key=lambda each: float(each["cpu_share"]))
        found[f"processes_{world}"] = {**worst, "cheap": max(worst["cpu_share"], worst["bytes_share"]) < MOST}
    return found
