"""What a forward leaves behind on the modules, and what becomes of it in a compiled model.

    self.mean = 0.9 * self.mean + ...   a buffer takes a new tensor      -> written back as if in place
    self.weights = attention            a tensor nobody reads again      -> not kept, a note in the log
    self.cache = hidden + self.cache    a tensor that the next call needs -> CaptureError: make it a buffer
    self.table = torch.arange(length)   a constant that is computed once  -> in the graph, a note in the log
    self.calls += 1                     a Python value                   -> frozen, a warning
    if random.random() < p: skip        a Python random choice           -> frozen, a warning
    COUNT += 1; seen.append(hidden)     a global or a closure            -> as before, a warning

Tracing runs the forward more than once; every run starts from the same attributes and the same Python random state,
and afterwards the modules, and what forward and hooks name outside of them, are as they were.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from autopar._compat import tree_leaves
from autopar.capture.labels import Labels
from autopar.capture.python_state import PythonState, differences, forwards
from autopar.errors import CaptureError

log = logging.getLogger(__name__)

_OWN = ("_parameters", "_buffers", "_modules")
_MISSING = object()


class ForwardState:
    """The attributes of the submodules of `model` around each run of its forward."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._modules = dict(model.named_modules())
        self._random = _random_state()
        self.drew_random_numbers = False
        self.changed_outside: list[str] = []
        self.changed: dict[tuple[str, str], Any] = {}
        """(module path, attribute) -> the value that the last run left there, where it differs."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """One run of the forward: assigned buffers are written back, other attributes put back afterwards."""
        before = {name: _attributes(module) for name, module in self._modules.items()}
        buffers = {name: dict(module._buffers) for name, module in self._modules.items()}
        outside = self._outside()
        _set_random_state(self._random)
        try:
            yield
            self._write_back(buffers)
        finally:
            self.drew_random_numbers |= _differs(_random_state(), self._random)
            _set_random_state(self._random)
            for name, module in self._modules.items():
                module._buffers.update(buffers[name])
                self._put_back(name, module, before[name])
            if not outside.unchanged():
                self.changed_outside = differences(outside.texts, self._outside().texts)
                outside.put_back()

    def _outside(self) -> PythonState:
        return PythonState(self._model, forwards(self._model), self._loss_fn)

    def _write_back(self, buffers: dict[str, dict[str, Tensor | None]]) -> None:
        for name, module in self._modules.items():
            for key, old in buffers[name].items():
                new = module._buffers.get(key)
                if old is None or new is old:
                    continue
                path = f"{name}.{key}".lstrip(".")
                if new is None or new.shape != old.shape:
                    found = "None" if new is None else f"shape {tuple(new.shape)}"
                    raise CaptureError(
                        f"forward assigns {found} to the buffer {path} of shape {tuple(old.shape)}: a buffer must keep "
                        "its shape; return what changes its shape as an output"
                    )
                with torch.no_grad():
                    old.copy_(new)

    def _put_back(self, name: str, module: nn.Module, before: dict[str, Any]) -> None:
        for key in dict.fromkeys((*before, *vars(module))):
            old, new = before.get(key, _MISSING), vars(module).get(key, _MISSING)
            if key in _OWN or _same(old, new):
                continue
            if new is not _MISSING:
                self.changed[name, key] = new
            if old is _MISSING:
                del vars(module)[key]
            else:
                vars(module)[key] = _copied(old)

    def report(self) -> None:
        """Say in the log what will be frozen or lost."""
        if self.drew_random_numbers:
            log.warning(
                "forward draws random numbers in Python (random or numpy.random): the choices of this trace are frozen "
                "in the graph; draw with torch.rand and choose with torch.where, or train without such choices"
            )
        for what in self.changed_outside:
            log.warning("capture put back what forward or a hook changed: %s; compiled calls do not change it", what)
        for (name, key), value in self.changed.items():
            path = f"{name}.{key}".lstrip(".")
            if _holds_tensor(value):
                log.info("forward stores a tensor in the attribute %s: the compiled model does not keep it", path)
            elif isinstance(value, (bool, int, float, str)):
                log.warning(
                    "forward changes the attribute %s (to %r): its value is frozen in the graph; register a buffer for "
                    "what changes from call to call",
                    path,
                    value,
                )

    def stores_tensors(self) -> bool:
        """Whether a run left a tensor in an attribute."""
        return any(_holds_tensor(value) for value in self.changed.values())

    def check_next_call(self, call: Callable[[], Any], given: Any) -> None:
        """Raises CaptureError where a second call needs what the first one stored: a tensor from which its outputs or
        buffers follow, and which follows from what is `given` (inputs, trained parameters) or a draw, or is replaced.

        A constant that is computed once and kept, such as a table for the shape of an input, is no such tensor."""
        self.changed = {}
        with Labels() as labels:
            labels.mark(given, "given")
            call()
            stored = dict(self.changed)
            differs = {place for place, value in stored.items() if labels.of(value)}
        with self.running():
            for (name, key), value in stored.items():
                self._modules[name].__dict__[key] = _copied(value)
            self.changed = {}
            with Labels() as labels:
                for place, value in stored.items():
                    labels.mark(value, place)
                needed = labels.of((call(), list(self._model.buffers())))
            differs |= self.changed.keys()
        for name, key in stored:
            if (name, key) in needed & differs:
                path = f"{name}.{key}".lstrip(".")
                raise CaptureError(
                    f"forward reads the tensor {path} that an earlier call stored: the graph cannot carry it from call "
                    "to call. Register it as a buffer of a fixed shape (self.register_buffer), or pass it in and "
                    "return it"
                )


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: _copied(value) for key, value in vars(module).items() if key not in _OWN}


def _copied(value: Any) -> Any:
    """Lists and dicts are copied, so that what a run appends is seen and undone."""
    return value.copy() if type(value) in (list, dict) else value


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if type(old) is list:
        return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
    if type(old) is dict:
        return old.keys() == new.keys() and all(old[key] is new[key] for key in old)
    return isinstance(old, (bool, int, float, str)) and bool(old == new)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _random_state() -> tuple[Any, Any]:
    return random.getstate(), numpy.random.get_state()


def _set_random_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])


def _differs(left: tuple[Any, Any], right: tuple[Any, Any]) -> bool:
    return left[0] != right[0] or left[1][2] != right[1][2] or bool((left[1][1] != right[1][1]).any())
