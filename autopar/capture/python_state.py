"""The Python state of a model: what its graph depends on beside tensors, and whether it is still so.

    self.alpha * x          alpha is an attribute that the forward read       model.alpha = 2    another graph
    SCALE * x               a global of the user's module, or a closure       SCALE = 2          another graph
    a hook on a submodule   it ran in the trace                               handle.remove()    another graph
    self.step = 7           nothing reads it in the forward                                      the same graph

Capture records which attributes a forward reads (`recorded_reads`). A `PythonState` holds their values, those of the
globals and closures that the functions among them name, and the hooks of all submodules. Asking it costs microseconds
while nothing changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, TypeAlias
from unittest import mock

from torch import Tensor, nn

from autopar._compat import GLOBAL_HOOKS
from autopar.capture.python_values import MISSING, Watch, is_of_user, is_record

Read: TypeAlias = tuple[str, str]
"""(path of a submodule, name of an attribute)"""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
LONGEST_SHOWN = 80
"""Characters of a value that `differences` shows."""
_OF_ALL_MODULES = frozenset((*vars(nn.Module()), *vars(nn.Module))) - {"forward", "__dict__"}
_TENSORS = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def recorded_reads(model: nn.Module) -> Iterator[set[Read]]:
    """Within the context, the attributes of submodules of `model` that are read are noted."""
    paths = {id(module): path for path, module in model.named_modules()}
    reads: set[Read] = set()

    def read(module: nn.Module, name: str) -> Any:
        path = paths.get(id(module))
        if path is not None and name not in _OF_ALL_MODULES:
            if name == "__dict__":
                if is_of_user(sys._getframe(1).f_globals.get("__name__")):
                    reads.update((path, key) for key in object.__getattribute__(module, name))
            else:
                reads.add((path, name))
        return object.__getattribute__(module, name)

    with mock.patch.object(nn.Module, "__getattribute__", read):
        yield reads


def all_attributes(model: nn.Module) -> set[Read]:
    """As if a forward had read every attribute."""
    return {(path, name) for path, module in model.named_modules() for name in (*vars(module), "forward")}


def forwards(model: nn.Module) -> set[Read]:
    """The forward of every submodule: what is known to run before it has run."""
    return {(path, "forward") for path, _ in model.named_modules()}


class PythonState:
    """The values of `reads` on `model`, of the globals and closures of the functions among them and of `loss_fn`, and
    the hooks. texts: place -> value as text; it is equal in all processes that hold equal values."""

    def __init__(self, model: nn.Module, reads: Set[Read], loss_fn: Callable[..., Any] | None = None) -> None:
        self._model, self._reads, self._loss_fn = model, frozenset(reads), loss_fn
        self.read_again()

    def digest(self) -> str:
        """sha256 (hex) of all values as they are now."""
        if not self._watch.unchanged():
            self.read_again()
        return self._digest

    def unchanged(self) -> bool:
        """Whether all values are those that were read last."""
        return self._watch.unchanged()

    def put_back(self) -> None:
        """Give all variables outside of the modules the values that were read last."""
        self._watch.put_back()

    def read_again(self) -> None:
        """Read all values."""
        self.texts: dict[str, str] = {}
        self._seen: set[types.CodeType] = set()
        function = weakref.WeakMethod(self._function)  # a state holds the model, which shall end with its last user
        self._watch = Watch(lambda met: (function() or _nothing)(met))
        self._classes: dict[tuple[type, str], Any] = {}
        modules = dict(self._model.named_modules())
        for path, name in sorted(self._reads):
            if path in modules and not any(name in vars(modules[path])[kind] for kind in _TENSORS):
                self._attribute(modules[path], path, name)
        self._hooks("all modules", GLOBAL_HOOKS)
        for path, module in modules.items():
            self._hooks(path or "the model", vars(module))
            self._note("the class of " + (path or "the model"), _class_name(type(module)))
        if isinstance(self._loss_fn, nn.Module):
            self._criterion(self._loss_fn)
        elif self._loss_fn is not None:
            self._note("loss_fn", self._watch.spelled(self._loss_fn))
        text = "\n".join(f"{place} = {self.texts[place]}" for place in sorted(self.texts))
        self._digest = hashlib.sha256(text.encode()).hexdigest()

    def _note(self, place: str, text: str) -> None:
        while self.texts.get(place, text) != text:  # another variable of this name
            place += "'"
        self.texts[place] = text

    def _attribute(self, module: nn.Module, path: str, name: str) -> None:
        value = self._watch.slot(vars(module), name)
        if value is not MISSING:
            self._note(f"{path}.{name}".lstrip("."), self._spelled(value))
            return
        kind = type(module)
        if (kind, name) not in self._classes:
            self._classes[kind, name] = found = self._of_class(kind, name)
            if found is not MISSING:
                self._note(f"{kind.__qualname__}.{name}", self._spelled(found))
        if self._classes[kind, name] is MISSING and not hasattr(nn.Module, name):
            self._note(f"{path}.{name}".lstrip("."), "absent")

    def _of_class(self, kind: type, name: str) -> Any:
        for each in kind.__mro__:
            if each is nn.Module:
                break
            value = self._watch.slot(vars(each), name)
            if value is not MISSING:
                return value
        return MISSING

    def _spelled(self, value: Any) -> str:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        return self._watch.spelled(value)

    def _hooks(self, place: str, owner: Mapping[str, Any]) -> None:
        for kind in HOOKS:
            hooks = owner[kind]
            self._watch.contents(hooks)
            for hook in hooks.values():
                self._note(f"{kind.strip('_')} of {place}", self._watch.spelled(hook))

    def _criterion(self, criterion: nn.Module) -> None:
        for path, module in criterion.named_modules():
            for name in (*vars(module), "forward"):
                if name not in _OF_ALL_MODULES:
                    self._attribute(module, f"loss_fn.{path}".rstrip("."), name)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                self._note(f"loss_fn.{path}.{name}", self._watch.spelled(tensor))

    def _function(self, function: types.FunctionType) -> None:
        """Note what a function of the user's names outside of itself."""
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                self._named(f"{name} in {function.__qualname__}", self._watch.cell(cell), code)
        if not is_of_user(function.__module__) or code in self._seen:
            return
        self._seen.add(code)
        for name in sorted(_names(code)):
            if name in function.__globals__:
                value = self._watch.slot(function.__globals__, name)
                self._named(f"{name} of {function.__module__}", value, code)

    def _named(self, place: str, value: Any, code: types.CodeType) -> None:
        if isinstance(value, types.ModuleType):
            if is_of_user(value.__name__):
                for name in sorted(_names(code) & vars(value).keys()):
                    self._variable(f"{name} of {value.__name__}", self._watch.slot(vars(value), name))
        else:
            self._variable(place, value)

    def _variable(self, place: str, value: Any) -> None:
        if isinstance(value, (type, types.ModuleType, nn.Module)) or value is MISSING:
            return
        if is_record(value) and not is_of_user(type(value).__module__) and not isinstance(value, types.SimpleNamespace):
            return
        if isinstance(value, Tensor) and value.requires_grad:
            return
        self._note(place, self._watch.spelled(value))


def _nothing(_: types.FunctionType) -> None:
    """Of a state that is gone."""


def _names(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in a function and those inside of it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Every place of two states that differs, such as: alpha is float:2.0, was float:1.0."""
    places = [place for place in dict.fromkeys((*new, *old)) if old.get(place) != new.get(place)]
    return [f"{place} is {_short(new, old, place)}, was {_short(old, new, place)}" for place in places]


def _short(mine: Mapping[str, str], other: Mapping[str, str], place: str) -> str:
    """The value, of a long one where it begins to differ."""
    text = mine.get(place, "absent")
    if len(text) <= LONGEST_SHOWN:
        return text
    pairs = zip(text, other.get(place, ""), strict=False)
    differs = next((at for at, (one, two) in enumerate(pairs) if one != two), 0)
    start = text.rfind(" ", 0, differs) + 1
    return f"{'...' if start else ''}{text[start : start + LONGEST_SHOWN]}..."
