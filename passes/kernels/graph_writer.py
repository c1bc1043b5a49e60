"""GraphWriter: puts one call in the place of several values of a graph, without breaking its order.

    write.replace(rms_norm, (x, weight, 1e-6), (out, rstd))
        r = rms_norm(x, weight, 1e-6)        in front of the first reader of `out` or `rstd`
        every reader of out reads r[0], cast and viewed as `out` was read; every reader of rstd reads r[1]

Shapes and dtypes of what is written come from the operator itself. In a captured graph it has a name of its own in the
module of what it stands for (`layers.0.norm/rms_norm#0`), in a lowered one the name of the captured operator.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.passes.kernels.graph_patterns import dtype_of, name_of, shape_of
from autopar.passes.tidy.insert import fake_value, placed_like
from autopar.passes.tidy.operator_paths import operator_kind

aten = torch.ops.aten
_KEPT = ("phase", "operator", "redistributes")
"""What a node of a lowered graph takes over from the one that it stands for."""


class GraphWriter:
    """Edits `graph` in place; `current` follows values that were replaced before."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._new: dict[fx.Node, fx.Node] = {}
        self._names = {node.meta.get("operator") for node in graph.nodes}

    def current(self, node: fx.Node) -> fx.Node:
        """What stands for a value now."""
        while node in self._new:
            node = self._new[node]
        return node

    def viewed(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """The value in another shape of as many elements."""
        node = self.current(node)
        if shape_of(node) == tuple(shape):
            return node
        with self._graph.inserting_after(node):
            view = self._graph.call_function(aten.reshape.default, (node, list(shape)))
        return self._describe(view, node)

    def erase_unread(self) -> None:
        """Take out what nobody reads any more."""
        for node in reversed(self._graph.nodes):
            if node.op == "call_function" and not node.users:
                self._graph.erase_node(node)

    def made(self, target: Callable[..., Any], args: Sequence[Any], like: fx.Node) -> fx.Node:
        """A further call, right behind its last operand, in the place and name of `like`."""
        args = [map_arg(argument, self.current) for argument in args]
        with self._graph.inserting_after(max(one for one in args if isinstance(one, fx.Node))):
            call = self._graph.call_function(target, tuple(args))
        return self._describe(call, like)

    def replace(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        old: Sequence[fx.Node | None],
        kwargs: dict[str, Any] | None = None,
        like: fx.Node | None = None,
    ) -> list[fx.Node]:
        """Let the outputs of a call stand for the values `old` (None: for nothing); they are returned in order. like:
        whose place and name the call takes, other than those of the first value."""
        read = [form_of(self.current(value)) for value in old if value is not None]
        place = min((user for value in read for user in value.users), default=None)
        if place is None:
            place = self._graph.output_node()
        args = [map_arg(argument, self.current) for argument in args]
        map_arg(args, partial(self._bring, place=place))
        like = like or next(value for value in old if value is not None)
        with self._graph.inserting_before(place):
            call = self._describe(self._graph.call_function(target, tuple(args), kwargs or {}), like)
            outputs = self._outputs(call, like)
            for value, output in zip(old, outputs, strict=True):
                if value is not None:
                    self._put(form_of(self.current(value)), output)
        return outputs

    def pass_on(self, old: fx.Node, new: fx.Node) -> None:
        """Let another value of its form stand for `old`."""
        new = self.current(new)
        old.replace_all_uses_with(new)
        self._new[old] = new

    def _outputs(self, call: fx.Node, like: fx.Node) -> list[fx.Node]:
        count = _count(call)
        if count is None:
            return [call]
        items = range(count)
        return [self._describe(self._graph.call_function(operator.getitem, (call, item)), like) for item in items]

    def _put(self, old: fx.Node, new: fx.Node) -> None:
        """Readers of `old` read `new` in its dtype and shape; written where the graph inserts."""
        if dtype_of(new) != dtype_of(old):
            options: dict[str, Any] = {"dtype": dtype_of(old)}
            new = self._describe(self._graph.call_function(aten._to_copy.default, (new,), options), old)
        if shape_of(new) != shape_of(old):
            new = self._describe(self._graph.call_function(aten.reshape.default, (new, list(shape_of(old)))), old)
        old.replace_all_uses_with(new)
        self._new[old] = new

    def _bring(self, value: fx.Node, place: fx.Node) -> None:
        """Move what `value` is made of in front of `place`, in its order, where it stands behind."""
        late: set[fx.Node] = set()
        stack = [value]
        while stack:
            node = stack.pop()
            if node not in late and not node < place:
                late.add(node)
                stack.extend(node.all_input_nodes)
        assert place not in late, f"{value} is made of {place}, in front of which it is needed"
        for node in sorted(late):
            place.prepend(node)

    def _describe(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """Write the meta of a node that stands for `like`: its place and name, shapes and dtypes by the operator."""
        if "local_shape" not in like.meta:
            node.meta = placed_like(like)
            node.meta["val"] = fake_value(node.target, node.args, node.kwargs)
            node.meta["operator"] = self._name(node, str(like.meta["operator"]))
            return node
        given_args, given_kwargs = map_arg((node.args, node.kwargs), _on_meta)
        value = node.target(*given_args, **given_kwargs)  # type: ignore[operator]  # of a call_function, so it is callable
        if isinstance(value, torch.Tensor):
            node.meta = {"local_shape": tuple(value.shape), "dtype": value.dtype}
        else:
            node.meta = {"local_shape": tuple(tuple(v.shape) for v in value), "dtype": tuple(v.dtype for v in value)}
        node.meta.update({key: like.meta[key] for key in _KEPT if key in like.meta})
        return node

    def _name(self, node: fx.Node, like: str) -> str:
        """The first name of its kind that is free in the module and the phase of `like`."""
        module, phase = like.removesuffix("/bwd").rpartition("/")[0], "/bwd" if like.endswith("/bwd") else ""
        names = (f"{module}/{operator_kind(node)}#{number}{phase}" for number in itertools.count())
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name


def _count(call: fx.Node) -> int | None:
    """How many values an operator returns; None for one that returns a tensor."""
    value = call.meta.get("val", call.meta.get("dtype"))
    return len(value) if isinstance(value, tuple | list) else None


def form_of(value: fx.Node) -> fx.Node:
    """The value as its only reader takes it: behind views and changes of dtype that nobody else reads."""
    while len(value.users) == 1:
        (user,) = value.users
        if name_of(user) not in ("reshape", "view", "_unsafe_view", "_to_copy") or user.args[0] is not value:
            return value
        value = user
    return value


def _on_meta(node: fx.Node) -> Any:
    shapes, dtypes = node.meta["local_shape"], node.meta["dtype"]
    if isinstance(dtypes, torch.dtype):
        return torch.empty(shapes, dtype=dtypes, device="meta")
    return tuple(torch.empty(s, dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True))
