"""What a node of a lowered graph says of its value on this rank: its phase, its bytes, its fake tensor.

    mm of local shape (4, 8) in float32       node_bytes  ->  128       meta["val"] after `describe_values`: (4, 8)

The lowering writes `local_shape`, `dtype` and `phase` into the meta of the nodes that it makes (`passes/emitter.py`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import torch
from torch import fx

aten = torch.ops.aten
VIEWS = frozenset({aten.reshape.default, aten.permute.default, aten.expand.default})
"""Calls that only look at their operand."""


VARYING = "rows_vary"
"""Key in the meta of a node that makes or reads as many rows as come: what its shape says is an expectation, and no
kernel is compiled for it. It holds how many times the bytes of that shape memory is planned for."""


def node_bytes(node: fx.Node) -> int:
    """Bytes of the local value of a node, of one whose rows vary those that memory is planned for; 0 for helpers whose
    shape was not described."""
    shapes, dtypes = node.meta.get("local_shape"), node.meta.get("dtype")
    if shapes is None or dtypes is None:
        return 0
    planned = float(node.meta.get(VARYING, 1.0))
    if isinstance(dtypes, torch.dtype):
        return int(math.prod(shapes) * dtypes.itemsize * planned)
    return int(planned * sum(math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True) if s is not None))


def describe_values(nodes: Iterable[fx.Node]) -> None:
    """Give every node of a lowered graph its `meta["val"]`: meta tensors of its local shapes. nodes: operands first. A
    total to which a gradient is added has the shape of the gradient; an intermediate of which the lowering says nothing
    is computed on meta tensors."""
    for node in nodes:
        if "val" in node.meta:
            continue
        shapes, dtypes = node.meta.get("local_shape"), node.meta.get("dtype")
        if node.target is torch.ops.aten.add_.Tensor and shapes is None:
            total, gradient = node.all_input_nodes
            for one in (node, total):
                one.meta["val"] = gradient.meta["val"]
            continue
        if shapes is None or dtypes is None:
            if node.op == "call_function" and callable(node.target):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
        elif isinstance(dtypes, torch.dtype):
            node.meta["val"] = torch.empty(shapes, dtype=dtypes, device="meta")
        else:
            pairs = zip(shapes, dtypes, strict=True)
            node.meta["val"] = tuple(None if s is None else torch.empty(s, dtype=d, device="meta") for s, d in pairs)


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes one output of an operator with several."""
    return node.target is operator.getitem


def is_backward(node: fx.Node) -> bool:
    """Whether the node runs in backward."""
    return node.meta.get("phase") == "backward"
