"""Python values as text, and whether they are still the same objects.

    watch = Watch()
    watch.spelled({"alpha": 2})          'dict(str:alpha=int:2)': equal for equal values, in every process
    watch.unchanged()                    microseconds: nothing that was spelled has other contents than then

Numbers, words, enums, dtypes and containers of them are spelled by value, tensors by their contents, functions by name
and code, objects of users by their attributes. What is none of these is spelled by its type, and its
changes go unnoticed.
"""

from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor, nn

from autopar._compat import FakeTensor, no_dispatch

MISSING = object()
LARGEST_CONTAINER = 256
"""Entries of the largest container that is followed: each is looked at in every call."""
LARGEST_CONTENTS = 1 << 24
"""Elements of the largest tensor whose contents are compared; of larger ones only the form and the object."""
DEEPEST = 6
"""Levels of containers inside of each other."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice, numpy.generic)
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
_FOREIGN = {"torch", "autopar", "numpy", "triton", "builtins", *sys.stdlib_module_names} - {"__main__"}

Slot: TypeAlias = tuple[Mapping[str, Any], str]
Met: TypeAlias = Callable[[types.FunctionType], None]


class Watch:
    """What was spelled, and where it stands. met: called with every function that is spelled."""

    def __init__(self, met: Met | None = None) -> None:
        self._met = met
        self._slots: list[Slot] = []
        self._held: list[Any] = []
        self._empty: list[Any] = []
        self._full: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._tensors: list[tuple[Tensor, int]] = []
        self._known: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no id comes again

    # noting

    def slot(self, mapping: Mapping[str, Any], key: str) -> Any:
        """The value at `key`, MISSING where there is none; whether it is another one is looked at from now on."""
        value = mapping.get(key, MISSING)
        self._slots.append((mapping, key))
        self._held.append(value)
        return value

    def cell(self, cell: types.CellType) -> Any:
        """The value of a closure's cell, watched; MISSING where it is empty."""
        value = contents_of(cell)
        self._cells.append((cell, value))
        return value

    def spelled(self, value: Any, depth: int = 0) -> str:
        """The value as text; what can change inside of it is watched."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, (*_NAMED, enum.Enum)):
            return f"{kind.__name__}:{value!s}" if kind is str else f"{kind.__name__}:{value!r}"
        if isinstance(value, type):
            return f"class:{_name(value)}"
        if id(value) in self._known:
            return self._known[id(value)]
        self._known[id(value)] = "itself"
        self._kept.append(value)
        self._known[id(value)] = found = self._opened(value, depth)
        return found

    def _opened(self, value: Any, depth: int) -> str:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, numpy.ndarray):
            return f"array:{value.dtype}{value.shape}"
        if isinstance(value, types.FunctionType):
            if self._met is not None:
                self._met(value)
            return f"{_name(value)}:{code_digest(value.__code__)}{self._all(value.__defaults__ or (), depth)}"
        if isinstance(value, types.MethodType):
            return f"method {self.spelled(value.__func__, depth)}"
        if isinstance(value, functools.partial):
            parts = (value.func, *value.args, *value.keywords.items())
            return f"partial {self._all(parts, depth)}"
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return f"{type(value).__name__}{self._container(value, depth)}"
        if is_record(value):
            return f"{_name(type(value))}{self._container(vars(value), depth)}"
        return f"{getattr(value, '__qualname__', '')}<{_name(type(value))}>"

    def _container(self, value: Any, depth: int) -> str:
        if len(value) > LARGEST_CONTAINER or depth >= DEEPEST:
            return f"({len(value)} entries)"
        if not isinstance(value, (tuple, frozenset)):
            self.contents(value)
        if isinstance(value, dict):
            return "(" + ", ".join(f"{k}={self.spelled(item, depth + 1)}" for k, item in value.items()) + ")"
        texts = [self.spelled(item, depth + 1) for item in value]
        return f"({', '.join(sorted(texts) if isinstance(value, (set, frozenset)) else texts)})"

    def contents(self, container: Any) -> None:
        """Watch which entries a list, set or dict has."""
        if container:
            self._full.append((container, tuple(container), _entries(container)))
        else:
            self._empty.append(container)

    def _all(self, values: Iterable[Any], depth: int) -> str:
        return "(" + ", ".join(self.spelled(value, depth + 1) for value in values) + ")"

    def _tensor(self, tensor: Tensor) -> str:
        form = f"tensor:{tensor.dtype}{tuple(tensor.shape)}"
        own = type(tensor) is Tensor and not tensor.requires_grad and tensor.layout == torch.strided
        if not own or tensor.is_meta or isinstance(tensor, FakeTensor):
            return form
        self._tensors.append((tensor, tensor._version))
        if tensor.numel() > LARGEST_CONTENTS:
            return form
        with no_dispatch():
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return f"{form}:{hashlib.sha256(raw.data).hexdigest()[:16]}"

    # looking again

    def unchanged(self) -> bool:
        """Whether all that was spelled is as it was then."""
        return (
            not any(self._empty)
            and all(map(is_, [mapping.get(key, MISSING) for mapping, key in self._slots], self._held))
            and all(contents_of(cell) is value for cell, value in self._cells)
            and all(tensor._version == version for tensor, version in self._tensors)
            and all(map(_is_as_before, self._full))
        )

    def put_back(self) -> None:
        """Give variables and containers the values that they had when they were spelled."""
        for (mapping, key), value in zip(self._slots, self._held, strict=True):
            if isinstance(mapping, dict) and mapping.get(key, MISSING) is not value:
                if value is MISSING:
                    del mapping[key]
                else:
                    mapping[key] = value
        for cell, value in self._cells:
            if value is not MISSING and contents_of(cell) is not value:
                cell.cell_contents = value
        for container in self._empty:
            container.clear()
        for full in self._full:
            if not _is_as_before(full):
                _refill(*full)


def _entries(container: Any) -> tuple[Any, ...]:
    return tuple(container.values() if isinstance(container, dict) else container)


def _is_as_before(full: tuple[Any, tuple[Any, ...], tuple[Any, ...]]) -> bool:
    container, _, entries = full
    now = container.values() if isinstance(container, dict) else container
    return len(container) == len(entries) and all(map(is_, now, entries))


def _refill(container: Any, keys: tuple[Any, ...], entries: tuple[Any, ...]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(keys, entries, strict=True))
    elif isinstance(container, set):
        container.update(entries)
    else:
        container.extend(entries)


def contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


@functools.cache
def code_digest(code: types.CodeType) -> str:
    """What a function does, without its lines: 12 hex digits."""
    constants = [code_digest(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    text = repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_record(value: Any) -> bool:
    """Whether an object is followed by its attributes: one of a class that is neither Python's nor torch's."""
    if isinstance(value, _RECORDS):
        return True
    if isinstance(value, (nn.Module, types.ModuleType)) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    return (type(value).__module__ or "builtins").partition(".")[0] not in _FOREIGN


@functools.cache
def is_of_user(module: str | None) -> bool:
    """Whether a module is the user's own, and not installed."""
    if module is None or module.partition(".")[0] in _FOREIGN:
        return False
    found = getattr(sys.modules.get(module), "__file__", None)
    if not found:
        return True
    place = Path(found)
    depth = module.count(".") + (place.stem == "__init__")
    if not {"site-packages", "dist-packages"}.isdisjoint(place.parts):
        return False
    if depth >= len(place.parents):  # a generated module lies in no package, whatever its name says
        return True
    return not _takes_packages(place.parents[depth])


@functools.cache
def _takes_packages(folder: Path) -> bool:
    """Whether pip installs into a folder, such as that of `pip install --target`."""
    return next(folder.glob("*.dist-info"), None) is not None
