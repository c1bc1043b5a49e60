"""Constants of the model's code are written out in the graph, so that a program has placeholders and operators only.

get_attr _tensor_constant0          -->   full([], 3.0)                  one value throughout
                                    -->   constant([0.1, 0.2], [2])      a few values
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autopar.errors import CaptureError
from autopar.ops.constant import constant

MAX_ELEMENTS = 4096


def inline_constants(graph_module: GraphModule, ctx: object) -> GraphModule:
    """Replace every get_attr node by a factory. Raises CaptureError for tensors of more than MAX_ELEMENTS."""
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr" and node.users:
            value = getattr(graph_module, str(node.target))
            if isinstance(value, Tensor):
                _inline(node, value)
    return graph_module


def _inline(node: Node, value: Tensor) -> None:
    if value.numel() > MAX_ELEMENTS or value.is_meta:
        raise CaptureError(
            f"the model uses a tensor of shape {tuple(value.shape)} that is neither parameter nor buffer; register "
            "it with register_buffer, so that it moves with the model"
        )
    flat: list[Any] = value.flatten().tolist()
    options: dict[str, Any] = {"dtype": value.dtype, "device": torch.device("cpu")}
    with node.graph.inserting_before(node):
        if len(set(flat)) <= 1:
            arguments = (list(value.shape), flat[0] if flat else 0)
            factory = node.graph.call_function(torch.ops.aten.full.default, arguments, options)
        else:
            factory = node.graph.call_function(constant, (flat, list(value.shape)), options)
    factory.meta = dict(node.meta)
    user = next(iter(node.users))
    mode = next(operand.meta["val"].fake_mode for operand in [user, *user.all_input_nodes] if "val" in operand.meta)
    with mode:
        factory.meta["val"] = torch.empty(value.shape, dtype=value.dtype)
    node.replace_all_uses_with(factory)
    node.graph.erase_node(node)
