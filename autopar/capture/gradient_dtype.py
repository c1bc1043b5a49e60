"""Gradients in a dtype of their own: what ranks add up, and what micro-batches are added in.

    reduce_dtype="fp32", parameters of bf16      return g16              -->   return g16.to(fp32)
    reduce_dtype="bf16", precision="bf16"        return g16.to(fp32)     -->   return g16

The graph returns the gradient of each parameter in this dtype, so a plan prices its sums over ranks at these bytes;
`.grad` is cast to the parameter's dtype when backward hands it out (`Step.parameter_gradient`). Sums over the batch of
one rank, and those of activations, stay in the dtype of their operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.passes.tidy.place_casts import is_cast
from autopar.program import Input, Output


def return_gradients_in(
    graph_module: fx.GraphModule, inputs: Sequence[Input], outputs: Sequence[Output], dtype: torch.dtype | None
) -> None:
    """Cast the gradients of floating parameters that the graph returns, in place. dtype: None changes nothing."""
    if dtype is None:
        return
    parameters = {value.name for value in inputs if value.role == "parameter"}
    end = graph_module.graph.output_node()
    returned: Any = end.args[0]
    pairs = zip(returned, outputs, strict=True)
    cast = [
        _in_dtype(node, dtype, end)
        if output.role == "gradient" and output.name in parameters and isinstance(node, fx.Node)
        else node
        for node, output in pairs
    ]
    end.args = (type(returned)(cast),)


def _in_dtype(gradient: fx.Node, dtype: torch.dtype, end: fx.Node) -> fx.Node:
    value = gradient.meta["val"]
    if value.dtype == dtype or not value.is_floating_point():
        return gradient
    if is_cast(gradient) and gradient.all_input_nodes[0].meta["val"].dtype == dtype:
        return gradient.all_input_nodes[0]
    with end.graph.inserting_before(end):
        cast = end.graph.call_function(torch.ops.aten._to_copy.default, (gradient,), {"dtype": dtype})
    cast.meta = {**gradient.meta, "val": value.to(dtype)}
    return cast
