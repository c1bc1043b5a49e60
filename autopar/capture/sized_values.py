"""What the calls of a graph make at another size: shapes, strides, dtypes, by running them on tensors without values.

    values.give(x, old_x, (6, 64))        a placeholder
    values.compute(y, old_y)              y.meta["val"] from its arguments; equal calls run once

Operators run on meta tensors, which costs a tenth of a fake mode, and each of them once: layers of a model repeat.
What a node of the old graph makes says the devices and the dtypes, which do not depend on a size: a norm of bf16 keeps
its statistics in bf16 on CPUs, and in fp32 on meta.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from autopar._compat import FakeTensor, FakeTensorMode, OpOverload, tree_leaves, tree_map

_META = torch.device("meta")


class SizedValues:
    """The values of one graph, on meta beside the fake ones that its nodes get."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._metas: dict[Node, Any] = {}
        self._made: dict[Hashable, tuple[Any, Any]] = {}

    def give(self, node: Node, old: Node, shape: tuple[int, ...]) -> None:
        """A placeholder of another shape, contiguous."""
        value = old.meta["val"]
        self._put(node, torch.empty(shape, dtype=value.dtype, device=_META), [value.device])

    def compute(self, node: Node, old: Node) -> None:
        """What a call makes. Raises what the operator raises where its arguments do not fit."""
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, Node)
            self._metas[node], node.meta["val"] = self._metas[source][index], source.meta["val"][index]
            return
        before = [value for value in tree_leaves(old.meta["val"]) if isinstance(value, Tensor)]
        devices, dtypes = [value.device for value in before], [value.dtype for value in before]
        key = (node.target, self._form(node.args), self._form(node.kwargs), *devices, *dtypes)
        made = self._made.get(key)
        if made is not None:
            self._metas[node], node.meta["val"] = made
            return
        self._put(node, _in_dtypes(self._result(node), dtypes), devices)
        self._made[key] = self._metas[node], node.meta["val"]

    def _result(self, node: Node) -> Any:
        target: Any = node.target
        with torch.no_grad():
            if not isinstance(target, OpOverload):
                args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
                with self._mode:
                    return tree_map(_on_meta, target(*args, **kwargs))
            args, kwargs = map_arg((node.args, node.kwargs), self._metas.__getitem__)
            return target(*args, **({**kwargs, "device": _META} if kwargs.get("device") is not None else kwargs))

    def _put(self, node: Node, meta: Any, devices: list[torch.device]) -> None:
        remaining = iter(devices)

        def fake(leaf: Any) -> Any:
            return FakeTensor(self._mode, leaf, next(remaining)) if isinstance(leaf, Tensor) else leaf

        self._metas[node] = meta
        node.meta["val"] = tree_map(fake, meta)

    def _form(self, argument: Any) -> Hashable:
        """What an argument is to an operator: of a tensor all but its values."""
        if isinstance(argument, Node):
            return tuple(
                (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf
                for leaf in tree_leaves(self._metas[argument])
            )
        if isinstance(argument, list | tuple):
            return tuple(map(self._form, argument))
        if isinstance(argument, dict):
            return tuple((name, self._form(value)) for name, value in argument.items())
        return type(argument), argument  # 1 == 1.0 == True


def _in_dtypes(result: Any, dtypes: list[torch.dtype]) -> Any:
    """A result on meta whose tensors have these dtypes, in order."""
    remaining = iter(dtypes)
    return tree_map(lambda leaf: _cast(leaf, next(remaining)) if isinstance(leaf, Tensor) else leaf, result)


def _cast(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    return leaf if leaf.dtype == dtype else torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype, device=_META)


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
