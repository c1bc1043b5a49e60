"""Insert a node with its fake value and the module of the node that it stands for."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from autopar._compat import FakeTensor, tree_leaves

PLACE = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "phase")


def insert_before(point: Node, target: Any, args: tuple[Any, ...], *, like: Node) -> Node:
    """A call of `target` before `point`, with meta `val` computed on fake tensors and the place of `like`."""
    with point.graph.inserting_before(point):
        node = point.graph.call_function(target, args)
    node.meta = placed_like(like)
    node.meta["val"] = fake_value(target, args)
    return node


def placed_like(like: Node) -> dict[str, Any]:
    """The meta that says where a node stands: module, source and phase."""
    return {key: like.meta[key] for key in PLACE if key in like.meta}


def fake_value(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """What a call gives for the fake values of its operands."""
    values, options = map_arg((args, kwargs or {}), lambda operand: operand.meta["val"])
    mode = next(value.fake_mode for value in tree_leaves(values) if isinstance(value, FakeTensor))
    with mode:
        return target(*values, **options)
