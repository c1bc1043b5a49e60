"""The arguments of a node as plain Python values: torch's own type for them is a union of twenty."""

from __future__ import annotations

from typing import Any

from torch.fx import Node


def arguments(node: Node) -> tuple[Any, ...]:
    """The positional arguments of `node`."""
    return node.args


def argument(node: Node, position: int, name: str, default: Any) -> Any:
    """The argument at `position`, else the keyword `name`, else `default`."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
