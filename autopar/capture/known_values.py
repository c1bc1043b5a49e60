"""Values that are known while a model is traced: those of tensors that the model makes itself from constants.

    mask = torch.ones(batch, length)           known: sizes are part of the graph
    if (mask == 2).any(): ...                  False, as it is in every call
    if (mask * input).any(): ...               unknown: what comes from an input or a parameter has no value here

`KnownValues` is the fake mode of a trace. Beside the fake tensor that a factory returns it keeps the real one, and
torch's own propagation of constants follows it through deterministic operators: `.item()`, `.tolist()`, `nonzero`
and truth values are answered from it. Writes of what is unknown, also through a view, make a value unknown. Where a
known value decides the shape of a tensor (`nonzero`, `x[mask]`), the tensor is a constant of the graph
(`fold_known_shapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from autopar._compat import FakeTensor, FakeTensorMode, OpOverload, no_dispatch, tree_leaves

aten = torch.ops.aten

LARGEST_KNOWN = 1 << 18
"""Elements of the largest tensor whose value is kept: 2 MiB of int64. Masks by token fit, masks by pair of tokens up
to 512 x 512."""

_FACTORIES = frozenset(
    ("zeros", "ones", "full", "arange", "eye", "linspace", "scalar_tensor", "tril_indices", "triu_indices")
)
_LIKE = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))
"""Factories that read only the shape and dtype of their first argument."""
_UNINITIALISED = frozenset(("empty_like", "new_empty", "new_empty_strided", "resize", "resize_"))
"""Operators whose results hold whatever stood in memory, also where their arguments are known."""
_SHAPED_BY_VALUES = frozenset(
    (aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default)
)
_DETERMINISTIC = ("aten", "prims", "prim")
"""Namespaces whose operators say whether they draw random numbers; those of ours and of users need not."""


class KnownValues(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode in which tensors from factories, and what follows from them alone, have values."""

    supports_higher_order_operators = True  # torch seeks their rules by exact class and finds none for a subclass

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """One operator; see FakeTensorMode."""
        if not isinstance(func, OpOverload):
            return super().dispatch(func, types, args, kwargs)  # type: ignore[arg-type]
        name = func.overloadpacket.__name__
        if func.namespace not in _DETERMINISTIC or name in _UNINITIALISED:
            return self._without_values(func, types, args, kwargs)
        result = super().dispatch(func, types, args, kwargs)  # type: ignore[arg-type]
        if not isinstance(result, FakeTensor) or result.constant is not None or not self._is_small(result):
            return result
        if name in _FACTORIES:
            return self._known(lambda: func(*args, **(kwargs or {})))
        if name in _LIKE and isinstance(args[0], FakeTensor):
            like = args[0]
            return self._known(lambda: func(_real_like(like), *args[1:], **(kwargs or {})))
        return result

    def known(self, tensor: Tensor) -> FakeTensor:
        """A fake tensor that has the value of `tensor`."""
        return self._known(lambda: tensor.detach().to("cpu", copy=True))

    def may_turn_const(self, t: Tensor) -> bool:
        """Whether the value of `t`, computed from known ones, is kept."""
        return self._is_small(t) and t.layout == torch.strided and not isinstance(t, FakeTensor)

    def _is_small(self, tensor: Tensor) -> bool:
        return tensor.numel() <= LARGEST_KNOWN and tensor.device.type == "cpu"

    def _known(self, make: Callable[[], Tensor]) -> FakeTensor:
        with no_dispatch():
            value = make()
        return self.fake_tensor_converter.from_real_tensor(self, value, make_constant=True)

    def _without_values(self, func: OpOverload[Any, Any], types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as if its arguments were unknown: it may draw random numbers."""
        known = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        values = [(leaf, leaf.constant) for leaf in known if leaf.constant is not None]
        for leaf, value in values:
            if func._schema.is_mutable and value is not None:
                self.fake_tensor_converter.invalidate_constant_aliases(value)
            leaf.constant = None
        result = super().dispatch(func, types, args, kwargs)
        if not func._schema.is_mutable:
            for leaf, value in values:
                leaf.constant = value
        return result


def makes_values(func: OpOverload[Any, Any]) -> bool:
    """Whether an operator may make a tensor of known value of unknown ones, or hide that its value is unknown."""
    name = func.overloadpacket.__name__
    return name in _FACTORIES or name in _LIKE or name in _UNINITIALISED


def _real_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def fold_known_shapes(graph_module: GraphModule) -> None:
    """Make tensors whose shape known values decided constants of the graph, in place, and forget all known values.

    i = nonzero(ones)                    -->   i = self.known_0
    y = index(x, [None, triangle])       -->   y = index(x, [None, self.known_0, self.known_1])
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (aten.index.Tensor, aten.index_put.default):
            indices = [part for index in node.args[1] for part in _whole(graph_module, node, index)]
            node.update_arg(1, indices)
        elif node.op == "call_function" and node.target in _SHAPED_BY_VALUES:
            for result in [node] if isinstance(node.meta["val"], Tensor) else list(node.users):
                (constant,) = _constants(graph_module, result, [_evaluated(graph_module, result)])
                constant.meta.update(result.meta)
                result.replace_all_uses_with(constant)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        for leaf in tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                leaf.constant = None


def _whole(graph_module: GraphModule, user: Node, index: Any) -> list[Any]:
    """What stands for one index of `user`: for a bool tensor of known value the whole numbers that it stands for."""
    if not isinstance(index, Node) or index.meta["val"].dtype != torch.bool or not _is_known(index):
        return [index]
    return list(_constants(graph_module, user, _evaluated(graph_module, index).nonzero().unbind(1)))


def _is_known(node: Node) -> bool:
    """Whether no input reaches a node, and no operator that may draw random numbers."""
    if node.op == "get_attr":
        return True
    plain = isinstance(node.target, OpOverload) and node.target.namespace in _DETERMINISTIC
    if node.op != "call_function" or not plain or torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return False
    return all(_is_known(argument) for argument in node.all_input_nodes)


def _constants(graph_module: GraphModule, before: Node, values: Sequence[Tensor]) -> Iterator[Node]:
    mode = before.meta["val"].fake_mode
    for value in values:
        name = f"known_{sum(node.op == 'get_attr' for node in graph_module.graph.nodes)}"
        graph_module.register_buffer(name, value.contiguous())
        with graph_module.graph.inserting_before(before):
            constant = graph_module.graph.get_attr(name)
        constant.meta["val"] = mode.from_tensor(value.contiguous())
        yield constant


def _evaluated(graph_module: GraphModule, node: Node) -> Tensor:
    """The value of a node that no input reaches."""
    if node.op == "get_attr":
        value: Tensor = getattr(graph_module, str(node.target))
        return value
    assert node.op == "call_function", f"{node.name} has no value of its own"
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: _evaluated(graph_module, argument))
    return node.target(*args, **kwargs)  # type: ignore[operator, no-any-return]
