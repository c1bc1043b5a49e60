"""Choose kernels: which kinds of groups run as a kernel of ours, by the price of the lowered program with and without.

    rms_norm        23.1 ms of kernels instead of 25.9      taken
    gated           25.9 ms instead of 25.9                 left: the backend fuses it as well
    cross_entropy   24.8 ms instead of 25.9                 taken

Kinds are tried one behind the other, each beside those that were taken and the backend's own kernels: a kernel of ours
is one launch that reads its operands and writes its results once (`kernel_groups`, `KernelPrices`), and so is a chain
that the backend fuses. Our kernels are Triton's, so there is nothing to choose on CPUs.
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import fx

from autopar._compat import LazyGraphModule
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.graphs.graph_copies import copied
from autopar.graphs.kernel_groups import Traffic, group_reads_writes, kernel_groups
from autopar.graphs.node_values import describe_values
from autopar.graphs.operator_names import is_causal
from autopar.hardware.cluster import Cluster
from autopar.passes.kernels.use_kernels import use_kernels
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import KERNELS
from autopar.program import Program

LEAST_GAIN = 1e-3
"""Share of the seconds of all kernels that a kind must save: equal prices leave the backend's kernels."""


def cheaper_kernels(plan: Plan, lowered: Program, cluster: Cluster) -> tuple[str, ...]:
    """The kinds of kernels that make the lowered program of a plan cheaper. lowered: without kernels of ours; it is
    left as it is."""
    if cluster.device.kind == "cpu":
        return ()
    price, recomputed = _Price(plan.kernel_backend, cluster), plan.recomputed
    kinds: tuple[str, ...] = ()
    module = _copy(lowered.graph_module)
    seconds = price.of(module)
    least = LEAST_GAIN * seconds
    for kind in KERNELS:
        before = _targets(module)
        module = use_kernels(module, recomputed, {kind})
        if _targets(module) == before:
            continue
        found = price.of(module)
        if found < seconds - least:
            kinds, seconds = (*kinds, kind), found
        else:
            module = use_kernels(_copy(lowered.graph_module), recomputed, kinds)
    return kinds


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    copy: fx.GraphModule = LazyGraphModule(module, copied(module.graph))
    return copy


def _targets(module: fx.GraphModule) -> Counter[object]:
    return Counter(node.target for node in module.graph.nodes if node.op == "call_function")


class _Price:
    """Seconds of all kernels of a program; equal kernels, as of equal layers, are priced once."""

    def __init__(self, backend: str, cluster: Cluster) -> None:
        self._backend, self._prices = backend, KernelPrices(device=cluster.device)
        self._known: dict[object, float] = {}

    def of(self, module: fx.GraphModule) -> float:
        describe_values(module.graph.nodes)
        groups = kernel_groups(module.graph, self._backend)
        members: dict[int, list[tuple[fx.Node, Traffic]]] = {}
        for node, traffic in group_reads_writes(module.graph, groups).items():
            members.setdefault(groups[node], []).append((node, traffic))
        return math.fsum(map(self._seconds, members.values()))

    def _seconds(self, kernel: list[tuple[fx.Node, Traffic]]) -> float:
        key = tuple(
            (
                node.target, _forms(node), tuple(map(_forms, node.all_input_nodes)), tuple(map(_forms, traffic.reads)),
                traffic.writes, is_causal(node), node.meta.get("num_experts"),
            )
            for node, traffic in kernel
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = self._prices.seconds(kernel)
        return self._known[key]


def _forms(node: fx.Node) -> object:
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple((tuple(one.shape), one.dtype) for one in values if isinstance(one, torch.Tensor))
