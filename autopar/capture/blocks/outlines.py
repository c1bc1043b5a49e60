"""The outline of a forward: what it does around the members of its runs, whose own operators are left out.

    h = embedding(ids)                     row 0: aten.embedding
    for layer in layers: h = layer(h)      rows 1 .. n: a member of "layers", with row 0, 1, 2 ... as argument
    return head(norm(h))                   the rows behind

The forward runs once, on fake tensors. The first member of a run runs too; the others are given arguments of the same
form, so they return values of the same form and are not run. An outline with all members that is the extension of the
outline of a shortened model says that the code around the members treats all of them alike.
"""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar._compat import FakeTensor, FakeTensorMode, TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from autopar.capture.blocks.equal_members import Run
from autopar.capture.blocks.sheets import Operand, Row, UnprovenError
from autopar.capture.roles import PREFIX

_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_Template: TypeAlias = tuple[TreeSpec, list[Any]]
"""The structure of a result, and of each leaf how to make it."""


class Outline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the mode, what a forward does is noted in `rows`. mode: of the fake tensors; index: path of each member of
    each run -> (run, number)."""

    def __init__(self, mode: FakeTensorMode, index: Mapping[str, tuple[Run, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[Row] = []
        self.mode = mode
        self.inside = 0
        self._index = index
        self._made: dict[int, tuple[int, int]] = {}
        self._kept: list[Any] = []  # so that no id comes again

    def __torch_dispatch__(
        self,
        func: Any,
        kinds: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside and func.namespace != "prim":
            owner, kind = self._cast(func, args)
            self.note(str(func), (args, dict(kwargs or {})), result, owner, kind)
        return result

    def given(self, step: nn.Module) -> None:
        """Note the parameters and buffers."""
        for kind, tensors in (("parameter", step.named_parameters()), ("buffer", step.named_buffers())):
            for name, tensor in tensors:
                owner, rest = self._owner(name)
                self.note(f"{kind} {rest}", (), tensor, owner, kind)

    def note(
        self, what: str, arguments: Any, result: Any, owner: tuple[Run, int] | None = None, kind: str = ""
    ) -> None:
        """One row: an operator or a member with what it takes and gives."""
        leaves: list[Any] = []
        given, spec = tree_flatten(arguments)
        for leaf in given:
            leaves += self._leaf(leaf)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        form = (what, str(spec), [_form(each) for each in made])
        self.rows.append(Row(form, tuple(leaves), kind=kind, source=owner))
        for slot, tensor in enumerate(made):
            self._made[id(tensor)] = (len(self.rows) - 1, slot)
        self._kept.append(made)

    def keep(self, values: Any) -> None:
        """Let the identity of values hold until the outline ends."""
        self._kept.append(values)

    def _cast(self, func: Any, args: Sequence[Any]) -> tuple[tuple[Run, int] | None, str]:
        """The owner of what is cast before any module runs."""
        made = self._made.get(id(args[0])) if func is torch.ops.aten._to_copy.default else None
        source = None if made is None else self.rows[made[0]]
        return (None, "") if source is None or source.kind != "parameter" else (source.source, "cast")

    def _owner(self, name: str) -> tuple[tuple[Run, int] | None, str]:
        parts = name.removeprefix(PREFIX).split(".")
        for length in range(1, len(parts)):
            found = self._index.get(".".join(parts[:length]))
            if found is not None:
                return found, f"{found[0].path} {'.'.join(parts[length:])}"
        return None, name

    def _leaf(self, leaf: Any) -> list[Any]:
        if not isinstance(leaf, Tensor):
            return [leaf if isinstance(leaf, _CONSTANTS) else repr(leaf)]
        row = self._made.get(id(leaf))
        return [_form(leaf)] if row is None else [Operand(row[0]), row[1]]


class Members:
    """Stands in for the forwards of the members of a run while an outline is made."""

    def __init__(self, outline: Outline, run: Run, members: Sequence[str]) -> None:
        self._outline, self._run, self._members = outline, run, members
        self._known: dict[str, _Template] = {}

    @contextlib.contextmanager
    def standing_in(self, model: nn.Module) -> Iterator[None]:
        """Within the context, members are noted as one row each."""
        modules = [model.get_submodule(path) for path in self._members]
        try:
            for index, module in enumerate(modules):
                module.__dict__["forward"] = _Stand(self, index, module.forward)
            yield
        finally:
            for module in modules:
                module.__dict__.pop("forward", None)

    def call(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What member `index` gives."""
        outline = self._outline
        if outline.inside:
            return forward(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        outline.keep(leaves)
        key = f"{spec} {[_argument(leaf, leaves) for leaf in leaves]}"
        outline.inside += 1
        try:
            if key in self._known:
                result = _from_template(self._known[key], leaves, outline.mode)
            else:
                result, self._known[key] = _run(forward, args, kwargs)
        finally:
            outline.inside -= 1
        outline.note(f"a member of {self._run.path}", (args, kwargs), result, (self._run, index), "member")
        return result


class _Stand:
    """The forward of a member; it holds what a bound method would."""

    def __init__(self, members: Members, index: int, forward: Callable[..., Any]) -> None:
        self._members, self._index, self._forward = members, index, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._members.call(self._index, self._forward, args, kwargs)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.grad_fn is None


def _argument(leaf: Any, leaves: Sequence[Any]) -> Any:
    """What a member is told by an argument."""
    if isinstance(leaf, Tensor):
        same = next(at for at, other in enumerate(leaves) if other is leaf)
        return same, _form(leaf), id(leaf) if _has_value(leaf) else None
    if isinstance(leaf, _CONSTANTS):
        return type(leaf).__name__, repr(leaf)
    if isinstance(leaf, (type, types.FunctionType, enum.Enum)):
        return "object", id(leaf)
    raise UnprovenError(f"a member is given an object of {type(leaf).__name__}")


def _has_value(tensor: Tensor) -> bool:
    """Whether the members may read the value of a tensor."""
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def _run(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, _Template]:
    """What a member gives, and how to make another of that form. Raises UnprovenError where it may do more."""
    leaves = tree_leaves((args, kwargs))
    versions = [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]
    result = forward(*args, **kwargs)
    after = tree_leaves((args, kwargs))
    if len(after) != len(leaves) or any(a is not b for a, b in zip(after, leaves, strict=True)):
        raise UnprovenError("a member changes a container among its arguments")
    if versions != [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]:
        raise UnprovenError("a member changes an argument in place")
    given, spec = tree_flatten(result)
    return result, (spec, [_made(leaf, leaves) for leaf in given])


def _made(leaf: Any, leaves: Sequence[Any]) -> Any:
    """A part of a result: the argument at a position, the form of a new tensor, or a constant in a list."""
    same = next((at for at, other in enumerate(leaves) if other is leaf and isinstance(leaf, Tensor)), None)
    if same is not None:
        return same
    if not isinstance(leaf, Tensor):
        if isinstance(leaf, _CONSTANTS):
            return [leaf]
        raise UnprovenError(f"a member returns an object of {type(leaf).__name__}")
    storages = {_storage(each) for each in leaves if isinstance(each, Tensor)}
    if _storage(leaf) in storages or _has_value(leaf):
        raise UnprovenError("a member returns a view of an argument or a known value")
    return _form(leaf)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _from_template(template: _Template, leaves: Sequence[Any], mode: FakeTensorMode) -> Any:
    spec, made = template
    with mode:
        return tree_unflatten([_fresh(each, leaves) for each in made], spec)


def _fresh(made: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(made, int):
        return leaves[made]
    if isinstance(made, list):
        return made[0]
    shape, stride, dtype, requires_grad, is_leaf = made
    tensor = torch.empty_strided(shape, stride, dtype=dtype, requires_grad=requires_grad)
    return tensor if is_leaf else tensor.clone()  # of which the code around may change the values
