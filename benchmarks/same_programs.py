"""Whether two programs are equal in all that later steps see, and which way captures took."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.fx import Node

from autopar._compat import tree_leaves
from autopar.capture import fingerprint
from autopar.capture.blocks import short_traces
from autopar.program import Program

COMPARED = ("nn_module_stack", "fwd_nn_module_stack", "phase", "operator", "partitioner_tag", "original_aten")
FIELDS = ("inputs", "outputs", "tensor_leaves", "output_leaves", "training", "reads", "guards")


def difference(one: Program, other: Program) -> str | None:
    """The first place in which two programs differ: name, operator, arguments or form of a node, input, output."""
    nodes, others = list(one.graph.nodes), list(other.graph.nodes)
    for left, right in zip(nodes, others, strict=False):
        if _described(left) != _described(right):
            return f"{left.format_node()}, whole {right.format_node()}"
    if len(nodes) != len(others):
        return f"{len(nodes)} nodes, whole {len(others)}"
    for field in FIELDS:
        if getattr(one, field) != getattr(other, field):
            return f"{field}: {getattr(one, field)}, whole {getattr(other, field)}"[:500]
    if (str(one.in_spec), str(one.out_spec)) != (str(other.in_spec), str(other.out_spec)):
        return "the structure of inputs or outputs"
    return None if fingerprint(one) == fingerprint(other) else "the fingerprint"


def _described(node: Node) -> tuple[Any, ...]:
    values = [(v.shape, v.stride(), v.dtype) for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)]
    meta = [str(node.meta.get(key)) for key in COMPARED]
    return node.op, node.name, str(node.target), str(node.args), str(node.kwargs), values, meta, sorted(node.meta)


@contextlib.contextmanager
def capture_reasons() -> Iterator[list[str]]:
    """What captures within the context say about their way."""
    found: list[str] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, level = Noted(), short_traces.log.level
    short_traces.log.addHandler(handler)
    short_traces.log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        short_traces.log.removeHandler(handler)
        short_traces.log.setLevel(level)
