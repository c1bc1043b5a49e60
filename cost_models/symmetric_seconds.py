"""Seconds of a product with its collective in symmetric memory: as many parts as ranks, copies beside them.

    4 ranks, a part takes 120 us, its copy 80 us      4 x 120 us of products, which hide the copies
    4 ranks, a part takes  50 us, its copy 80 us      50 us + 3 x 80 us: the links are the limit

A rank begins with its own part and takes the others' one after the other, each while the part before it is computed; a
scatter does the same the other way round. Copy engines move the bytes and take no multiprocessor, so nothing slows the
products down (docs.pytorch.org, "symmetric memory"; the authors' account of it, discuss.pytorch.org/t/209487, which
measured 8 % of a training step of Llama 3 on H100). A copy is priced as a message between two ranks of the node. Around
that are copies in the rank's own memory and barriers of its group, as torch 2.13 has them: the block that others read,
what lies in another order, and the sum of the parts. No GPU has measured that here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._compat import Graph
from autopar.cost_models.collective_costs import collective_seconds
from autopar.cost_models.kernel_seconds import KernelPrices
from autopar.cost_models.operator_costs import operator_seconds
from autopar.graphs.kernel_groups import Traffic
from autopar.graphs.symmetric_sizes import SymmetricSizes, symmetric_sizes
from autopar.hardware.cluster import Cluster
from autopar.hardware.group_topology import GroupTopology
from autopar.layouts.placement import Mesh


def symmetric_seconds(node: fx.Node, cluster: Cluster, mesh: Mesh, prices: KernelPrices) -> tuple[float, float]:
    """(seconds of the multiprocessors, seconds that they wait for copies) of a call."""
    sizes, dtype = symmetric_sizes(node), _dtype(node)
    axes = tuple(mesh.axis_names.index(name) for name in node.meta["group_axes"])
    topology = GroupTopology.of(cluster, mesh.shape, axes)
    copy = float(collective_seconds("neighbours", sizes.part_bytes, topology, cluster))
    part = sum(_product_seconds(sizes.rows, sizes.inner, width, dtype, prices) for width in sizes.columns)
    barriers = 3 if sizes.gathers else 2 * sizes.ranks
    own = sum(_memory_seconds(nbytes, dtype, cluster) for nbytes in _moved_bytes(sizes))
    computed = sizes.ranks * part + own + barriers * cluster.device.launch_seconds
    return computed, max(0.0, (sizes.ranks - 1) * (copy - part))


def _moved_bytes(sizes: SymmetricSizes) -> list[float]:
    """Of each kernel that moves bytes in the rank's own memory, read and written."""
    product = float(sizes.ranks * sizes.rows * sum(sizes.columns) * sizes.itemsize)
    operand = float(sizes.ranks * sizes.rows * sizes.inner * sizes.itemsize)
    part = float(sizes.part_bytes)
    if not sizes.gathers:
        return [product + part, *([2 * operand] if sizes.moves_rows else [])]
    kept = [2 * operand if sizes.moves_rows else 2 * part] if sizes.keeps else []
    return [2 * part, *kept, *([2 * part, 2 * product] if sizes.moves_rows else [])]


def _memory_seconds(nbytes: float, dtype: torch.dtype, cluster: Cluster) -> float:
    name = str(dtype).removeprefix("torch.")
    return float(
        operator_seconds(cluster.device, flops=0.0, bytes_moved=nbytes, dtype=name, kind="memory", operator="clone")
    )


def _product_seconds(rows: int, inner: int, width: int, dtype: torch.dtype, prices: KernelPrices) -> float:
    """Of one part with one weight: as the product by itself."""
    graph = Graph()
    operands = [_given(graph, shape, dtype) for shape in ((rows, inner), (inner, width))]
    product = graph.call_function(torch.ops.aten.mm.default, tuple(operands))
    product.meta["val"] = torch.empty((rows, width), dtype=dtype, device="meta")
    return prices.seconds([(product, Traffic(reads=tuple(operands), writes=(0,)))])


def _given(graph: fx.Graph, shape: tuple[int, int], dtype: torch.dtype) -> fx.Node:
    node = graph.placeholder("operand")
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return node


def _dtype(node: fx.Node) -> torch.dtype:
    rows: Any = node.args[0]
    return rows.meta["dtype"]  # type: ignore[no-any-return]
