"""Trace a function, tidy it with chosen passes, and run it: the frame of the tests of tidy passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.runner import Pass, run_passes
from autopar.passes.tidy.tidy_passes import TidyContext

NO_BACKWARD = TidyContext(tangents=frozenset(), num_forward_outputs=1)


def trace(function: Callable[..., Any], *tensors: Tensor) -> GraphModule:
    """The graph of `function` on fake tensors; it returns a tuple."""

    def flat(*values: Tensor) -> tuple[Any, ...]:
        result = function(*values)
        return result if isinstance(result, tuple) else (result,)

    return make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)


def check_pass(
    passes: Sequence[Pass[Any]], function: Callable[..., Any], *tensors: Tensor, ctx: TidyContext = NO_BACKWARD
) -> list[Node]:
    """Run `passes` on the traced function; same results, fake values of the right shape. Returns the operators."""
    graph_module, _ = run_passes(trace(function, *tensors), passes, ctx)
    expected = function(*tensors)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for actual, wanted in zip(graph_module(*tensors), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    Shapes(graph_module).run(*tensors)
    return [node for node in graph_module.graph.nodes if node.op == "call_function"]


class Shapes(torch.fx.Interpreter):
    """Runs a graph and compares every tensor with the node's fake value."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            assert (result.shape, result.dtype) == (n.meta["val"].shape, n.meta["val"].dtype), n
        return result


def names(nodes: Sequence[Node]) -> list[str]:
    """`mm` for aten.mm.default."""
    return [str(getattr(getattr(n.target, "overloadpacket", n.target), "__name__", n.target)) for n in nodes]
