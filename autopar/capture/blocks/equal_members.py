"""Runs of equal modules: neighbours in a ModuleList or Sequential of which a trace of few stands for all.

    layers.0 ... layers.31    32 decoder layers of one class, shapes and modes     ->  Run("layers", "0".."31")
    blocks.0, .1 | .2 ...     the third has other shapes, a hook or a tied weight   ->  no member of the run

Equal form is seen here: classes, names, shapes, dtypes, modes, no hooks, nothing shared with elsewhere. Whether what
the forward reads beside it is equal too (`read_alike`) is known after a trace, which records the reads: an index that
nobody reads may differ, one that is read may not. Two members that read equal values in one code do the same.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autopar.capture.python_state import HOOKS, Read
from autopar.capture.python_values import MISSING, contents_of, is_of_user, is_record

TRACED = 4
"""Members that a short trace keeps: the first, two whose difference is the rule for further ones, and the last."""
LEAST = 6
"""Members of the shortest run that is worth it."""
DEEPEST = 12
"""Levels of values inside of each other that are compared."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, dict, set, frozenset, *_PLAIN[:6])
_OWN = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Run:
    """Equal members of the container at `path`, by their names in it, in order."""

    path: str
    names: tuple[str, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """Paths of all members."""
        return tuple(f"{self.path}.{name}".lstrip(".") for name in self.names)

    @property
    def traced(self) -> tuple[str, ...]:
        """Paths of those that a short trace keeps."""
        return (*self.members[: TRACED - 1], self.members[-1])

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the others."""
        return self.names[TRACED - 1 : -1]


def find_runs(model: nn.Module) -> list[Run]:
    """The outermost runs of at least LEAST members, in the order of the modules."""
    seen = Counter(id(tensor) for module in model.modules() for tensor in _tensors(module))
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    found: list[Run] = []
    for path, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)) or any(_inside(path, run) for run in found):
            continue
        forms = [(name, _form(child, seen, places)) for name, child in container._modules.items()]
        for form, group in itertools.groupby(forms, key=lambda pair: pair[1]):
            names = tuple(name for name, _ in group)
            if form is not None and len(names) >= LEAST:
                found.append(Run(path, names))
    return found


def _inside(path: str, run: Run) -> bool:
    return path in run.members or path.startswith(tuple(f"{member}." for member in run.members))


def _tensors(module: nn.Module) -> list[Tensor]:
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in own if tensor is not None]


def _form(member: nn.Module | None, seen: Counter[int], places: Counter[int]) -> Hashable:
    """What must be equal; None where the member shares something, has hooks of the user or a forward of its own."""
    if member is None:
        return None
    parts: list[Hashable] = []
    for path, module in member.named_modules():
        shared = places[id(module)] > 1 or any(seen[id(tensor)] > 1 for tensor in _tensors(module))
        hooks = _hooks(module)
        if shared or "forward" in vars(module) or any(is_of_user(getattr(h, "__module__", None)) for _, h in hooks):
            return None
        tensors = (*module._parameters.items(), *module._buffers.items())
        kinds = tuple(kind for kind, _ in hooks)
        parts.append((path, type(module), module.training, kinds, tuple((n, _tensor_form(t)) for n, t in tensors)))
    return tuple(parts)


def _hooks(module: nn.Module) -> list[tuple[str, Any]]:
    return [(kind, hook) for kind in HOOKS for hook in getattr(module, kind).values()]


def _tensor_form(tensor: Tensor | None) -> Hashable:
    if tensor is None or is_lazy(tensor):
        return str(type(tensor))
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


@contextlib.contextmanager
def shortened(model: nn.Module, runs: Sequence[Run]) -> Iterator[None]:
    """Within the context the containers hold the traced members of each run only; nothing is copied."""
    held = {run.path: model.get_submodule(run.path)._modules for run in runs}
    whole = {path: dict(children) for path, children in held.items()}
    try:
        for run in runs:
            for name in run.left_out:
                del held[run.path][name]
        yield
    finally:
        for path, children in held.items():
            children.clear()
            children.update(whole[path])


def read_alike(model: nn.Module, run: Run, reads: Set[Read]) -> str | None:
    """The first attribute that a traced member read and that differs between members; None where all are equal."""
    first, *others = [model.get_submodule(path) for path in run.members]
    inside = sorted(_reads_inside(run, reads))
    for other in others:
        comparison = _Comparison(first, other)
        for path, name in inside:
            if not comparison.equal(_value(first, path, name), _value(other, path, name)):
                return f"{type(first.get_submodule(path)).__qualname__}.{name}"
        for (path, one), two in zip(first.named_modules(), other.modules(), strict=True):
            if not comparison.equal(_hooks(one), _hooks(two)):
                return f"hooks of {path or 'the member'}"
    return None


def reads_of_all(run: Run, reads: Set[Read]) -> set[Read]:
    """The reads of all members, where those of the traced ones are known."""
    inside = _reads_inside(run, reads)
    found = {(f"{member}.{path}".rstrip("."), name) for member in run.members for path, name in inside}
    if (run.path, run.names[0]) in reads:
        found |= {(run.path, name) for name in run.names}
    return found


def _reads_inside(run: Run, reads: Set[Read]) -> set[Read]:
    return {
        (path.removeprefix(member).lstrip("."), name)
        for path, name in reads
        for member in run.traced
        if path == member or path.startswith(f"{member}.")
    }


def _value(member: nn.Module, path: str, name: str) -> Any:
    owner = member.get_submodule(path)
    if any(name in vars(owner)[kind] for kind in _OWN):
        return None  # compared as form
    return vars(owner).get(name, MISSING)  # what a class holds is equal for one class


class _Comparison:
    """Whether a value on one member is the same, seen from another: identical, plain and equal, or made of such."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        self._places = [{id(module): path for path, module in each.named_modules()} for each in (one, other)]

    def equal(self, one: Any, other: Any, depth: int = 0) -> bool:
        """See the class."""
        if one is other:
            return True
        if type(one) is not type(other) or depth > DEEPEST:
            return False
        if isinstance(one, nn.Module):
            place = self._places[0].get(id(one))
            return place is not None and place == self._places[1].get(id(other))
        if isinstance(one, _PLAIN):
            return repr(one) == repr(other)
        if type(one) in (list, tuple):
            return len(one) == len(other) and all(self.equal(*pair, depth + 1) for pair in zip(one, other, strict=True))
        if type(one) is dict:
            return list(one) == list(other) and all(self.equal(one[key], other[key], depth + 1) for key in one)
        parts = _parts(one)
        return parts is not None and self.equal(parts, _parts(other), depth + 1)


def _parts(value: Any) -> tuple[Any, ...] | None:
    """What an object is made of; None where that is not known."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        cells = tuple(contents_of(cell) for cell in value.__closure__ or ())
        return (value.__code__, id(value.__globals__), value.__defaults__, value.__kwdefaults__, vars(value), cells)
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if is_record(value) and not isinstance(value, _CONTAINERS):
        return (vars(value),)
    return None
