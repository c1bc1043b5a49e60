"""Fused kernels of training stacks: what their backward computes again inside, so that forward keeps less.

    y = x * rsqrt(mean(x^2) + eps) * w      one kernel: keeps x and rsqrt(...), not the float32 copies between
    y = silu(gate) * up                     one kernel: keeps gate and up, not silu(gate)
    k.repeat for grouped queries            the attention kernel reads k itself

The names are given to `split_forward_backward(recompute=...)`, so that the lowered program of a model whose kernels
are fused keeps what the fused model keeps. Sources: Transformer Engine's `LayerNormLinear` and `swiglu`,
FlashAttention's grouped queries, inductor's recomputation of pointwise chains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from autopar.graphs.kernel_groups import group_reads_writes, is_pointwise, is_reduction, kernel_groups

aten = torch.ops.aten


def made_again(graph: fx.Graph) -> frozenset[str]:
    """Names of the forward operators whose values a fused backward kernel makes again."""
    forward = [node for node in graph.nodes if _is_forward_call(node)]
    return frozenset(str(node.meta["operator"]) for node in (*_in_norms(forward), *_gates(forward), *_copies(forward)))


def unwritten(nodes: Sequence[fx.Node]) -> frozenset[str]:
    """Names of the nodes of one graph whose value stays inside of a fused kernel and takes no memory."""
    if not nodes:
        return frozenset()
    graph = nodes[0].graph
    traffic = group_reads_writes(graph, kernel_groups(graph, "inductor", phase=lambda node: ""))
    return frozenset(node.name for node, moved in traffic.items() if not moved.writes)


def _is_forward_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("phase") != "backward" and "operator" in node.meta


def _in_norms(forward: list[fx.Node]) -> Iterator[fx.Node]:
    """Pointwise operators of a module that normalises by a reciprocal root, but that root and what leaves it."""
    modules: dict[str, list[fx.Node]] = defaultdict(list)
    for node in forward:
        modules[str(node.meta["operator"]).rpartition("/")[0]].append(node)
    for nodes in modules.values():
        if not any(node.target is aten.rsqrt.default for node in nodes):
            continue
        inside = set(nodes)
        for node in nodes:
            is_fused = is_pointwise(node) or is_reduction(node)
            readers = {user for user in node.users if user.meta.get("phase") != "backward"}
            if is_fused and node.target is not aten.rsqrt.default and readers and readers <= inside:
                yield node


def _gates(forward: list[fx.Node]) -> Iterator[fx.Node]:
    """Activations that only multiply another value."""
    for node in forward:
        if node.target in (aten.silu.default, aten.sigmoid.default):
            readers = [user for user in node.users if user.meta.get("phase") != "backward"]
            if readers and all(user.target is aten.mul.Tensor for user in readers):
                yield node


def _copies(forward: list[fx.Node]) -> Iterator[fx.Node]:
    """Expanded values that are written out for an operator that could read the narrow one."""
    for node in forward:
        if node.target is aten.clone.default and node.all_input_nodes[0].target is aten.expand.default:
            yield node
