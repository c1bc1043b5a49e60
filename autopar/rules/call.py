"""Call: what a rule may look at when an operator is called: shapes, dtypes and attributes, never values.

    aten.sum.dim_IntList(x: f32[4, 6], [-1])  ->  Call(target, (TensorSpec((4, 6), f32), (-1,)), (), outputs)

A `Call` is hashable, so that a rule is derived once per distinct call and not once per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor operand or output."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One call of an operator. args, kwargs: attributes with lists as tuples and tensors as `TensorSpec`s; outputs:
    None for an output that is no tensor."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec | None, ...]

    @cached_property
    def operands(self) -> tuple[TensorSpec, ...]:
        """Tensor operands in the order of `tensor_operands`."""
        return tuple(_leaves((self.args, tuple(value for _, value in self.kwargs))))

    @cached_property
    def text(self) -> str:
        """The call in one line: operator, dtypes and shapes, attributes."""
        named = [f"{name}={_text(value)}" for name, value in self.kwargs]
        return f"{self.target}({', '.join([*map(_text, self.args), *named])})"

    def argument(self, name: str) -> Any:
        """Value of the argument `name`, its default where it is not given. Raises KeyError for an unknown name."""
        for key, value in self.kwargs:
            if key == name:
                return value
        position, default = argument_slot(self.target, name)
        return self.args[position] if position < len(self.args) else default


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _leaves(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)


@cache
def argument_slot(target: Any, name: str) -> tuple[int, Any]:
    """(position, default) of the argument `name` of an operator. Raises KeyError for an unknown name."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return position, argument.default_value
    raise KeyError(f"{target} has no argument {name!r}")


def call_of(node: fx.Node) -> Call:
    """The call that `node` makes."""
    value = node.meta["val"]
    outputs = tuple(value) if isinstance(value, tuple | list) else (value,)
    return Call(
        node.target,
        tuple([_frozen(argument) for argument in node.args]),
        tuple([(key, _frozen(argument)) for key, argument in node.kwargs.items()]),
        tuple([_spec(output) for output in outputs]),
    )


def _spec(value: Any) -> TensorSpec | None:
    return TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _frozen(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return _spec(argument.meta.get("val"))
    if isinstance(argument, tuple | list):
        return tuple([_frozen(item) for item in argument])
    return argument


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Tensor nodes among args and kwargs, in pytree order, duplicates kept."""
    found: list[fx.Node] = []
    _collect(node.args, found)
    _collect(node.kwargs.values(), found)
    return found


def _collect(values: Iterable[Any], found: list[fx.Node]) -> None:
    for value in values:
        if isinstance(value, fx.Node):
            if isinstance(value.meta.get("val"), torch.Tensor):
                found.append(value)
        elif isinstance(value, tuple | list):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
