"""A lowered graph as readable Python, a line per node.

    mm = aten.mm(view, t)                                             # layers.0.up/mm#0  (2048, 1024) float32
    wait = wait_tensor(all_reduce)                                    # layers.0.up/mm#0  (2048, 1024) float32
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

CODE_COLUMN = 72
"""Where comments begin, if the line is not longer."""


def graph_text(graph: fx.Graph) -> Iterator[str]:
    """The lines of one graph; behind a call its operator, local shape and dtype, and of what it is a copy."""
    for node in graph.nodes:
        meta = node.meta
        copy = meta.get("redistributes")
        parts = [str(meta.get("operator", "")), _form(meta.get("local_shape"), meta.get("dtype"))]
        parts.append("" if copy is None else f"copy of {copy.value} as {' '.join(map(str, copy.layout))}")
        comment = "  ".join(part for part in parts if part)
        yield with_comment(statement(node), "" if node.op == "output" else comment)


def with_comment(line: str, comment: str) -> str:
    """The line, and its comment in a column of its own."""
    return f"{line:<{CODE_COLUMN}}  # {comment}" if comment else line


def statement(node: fx.Node) -> str:
    """A node as a Python statement."""
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name} = given({str(node.target)!r})"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    arguments = [_argument(arg) for arg in node.args]
    arguments += [f"{name}={_argument(arg)}" for name, arg in node.kwargs.items()]
    return f"{node.name} = {_called(node)}({', '.join(arguments)})"


def _called(node: fx.Node) -> str:
    """ "aten.mm", "all_reduce", "getitem"."""
    target = node.target
    namespace = getattr(target, "namespace", "")
    name = str(getattr(target, "_opname", "")) or str(getattr(target, "__name__", target))
    return f"{namespace}.{name}" if namespace and namespace != "_c10d_functional" else name


def _argument(value: object) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_argument, value))}]"
    return str(value) if not isinstance(value, str) else repr(value)


def _form(shape: object, dtype: object) -> str:
    if shape is None:
        return ""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else "several"
    return f"{tuple(shape)} {name}"  # type: ignore[arg-type]  # a tuple of sizes, or of shapes
