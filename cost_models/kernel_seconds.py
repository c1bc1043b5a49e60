"""Seconds of one kernel of a lowered program: its nodes say sizes, FLOPs and bytes, `operator_seconds` says the time.

    mm (4096, 2048) @ (2048, 3072)        a product: tiles, waves, K loop            operators_gemm
    autopar::attention (4, 16, 1024, 128) fused attention, forward or backward       operators_attention
    add + gelu + dropout                  the bytes of the whole kernel, once        operators_memory

The planner asks the same function with the same sizes for every strategy (`planner/problem/prices.py`), so a plan and
the program made of it have one price. A bias added in a product's kernel costs nothing of its own; a gradient of a
weight that is added to its total reads and writes that total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar.cost_models.operator_costs import element_flops, operator_seconds
from autopar.cost_models.operator_sizes import (
    AttentionSizes,
    ProductSizes,
    Sizes,
    flops_of,
    has_sizes,
    sizes_of,
    whole,
)
from autopar.cost_models.operators_attention import pairs_in_blocks
from autopar.cost_models.sustained import AttentionKernel
from autopar.graphs.expert_loads import OWN_ROWS
from autopar.graphs.kernel_groups import Traffic, bytes_moved
from autopar.graphs.operator_names import (
    LINEAR_LOSSES,
    argument_names,
    base_name,
    curve_name,
    is_causal,
    operator_kind,
    window_of,
)
from autopar.hardware.devices import Device
from autopar.ops.attention_blocks import CAUSAL, Band
from autopar.rules.engine import rule_for, tensor_operands


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPrices:
    """What prices kernels. device: with the curves and the profile that count; product_dtype: of matrix products, where
    it is not that of their operands (float8); gradient_bytes: of an element of the buffer to which weight gradients are
    added, 0: they are written as they are; attention: the kernel that the software calls, torch's where not said."""

    device: Device
    product_dtype: str | None = None
    gradient_bytes: int = 0
    attention: AttentionKernel = "vendor"
    _known: dict[tuple[object, ...], float] = field(init=False, repr=False, compare=False, default_factory=dict)
    """What kernels of these sizes take: equal layers have equal kernels."""

    def seconds(self, nodes: Sequence[tuple[fx.Node, Traffic]], *, adds_gradient: bool = False) -> float:
        """Seconds of one kernel by its nodes (program order) and what each moves."""
        heavy = next((node for node, _ in nodes if operator_kind(node.target) != "memory"), None)
        first = nodes[0][0] if heavy is None else heavy
        if heavy is None:
            known = (local_sizes(node, self.device.kind) for node, _ in nodes)
            sizes = next((found for found in known if found is not None), None)
            flops = sum(self._element_flops(node) for node, _ in nodes)
        else:
            sizes = local_sizes(heavy, self.device.kind)
            flops = _flops(heavy, sizes)
            if adds_gradient and self.gradient_bytes and isinstance(sizes, ProductSizes):
                sizes = replace(sizes, output_bytes=self.gradient_bytes, accumulates=True)
        moved = sum(sum(local_bytes(node, traffic)) for node, traffic in nodes)
        asked = (first.target, dtype_name(first), flops, moved)
        key = (*asked, *_said(sizes))
        if key not in self._known:
            self._known[key] = self._of_sizes(*asked, sizes)
        return self._known[key]

    def _of_sizes(self, target: Any, dtype: str, flops: float, moved: float, sizes: Sizes | None) -> float:
        kind = operator_kind(target)
        return float(
            operator_seconds(
                self.device,
                flops=flops,
                bytes_moved=moved,
                dtype=self.product_dtype if self.product_dtype and kind == "matmul" else dtype,
                kind=kind,
                operator=curve_name(target),
                sizes=sizes,
                attention=self.attention,
            )
        )

    def _element_flops(self, node: fx.Node) -> float:
        largest = max((value.numel() for value in _values(node)), default=0)
        return largest * element_flops(self.device, base_name(node.target))


def local_sizes(node: fx.Node, kind: str) -> Sizes | None:
    """The sizes of a product, attention, norm, softmax or lookup with local `meta["val"]`, on a device of this kind;
    None for others."""
    name = base_name(node.target)
    if not has_sizes(name):
        return None
    operands = [tuple(operand.meta["val"].shape) for operand in tensor_operands(node)]
    result = tuple(_values(node)[0].shape)
    if OWN_ROWS in node.meta:  # a block of the experts works on its own rows only
        own = max(1, round(operands[0][0] * node.meta[OWN_ROWS]))
        operands = [(own, *shape[1:]) if shape[0] == operands[0][0] else shape for shape in operands]
    sizes = sizes_of(name, operands, result, whole(len(operands)), is_causal(node))
    window = window_of(node)
    if not isinstance(sizes, AttentionSizes) or not (sizes.causal or window is not None):
        return sizes
    pairs = _seen_pairs(node, Band.of(sizes.causal, window), sizes, kind)
    return sizes if pairs is None else replace(sizes, keys=pairs / np.asarray(sizes.queries), causal=False)


def _said(sizes: Sizes | None) -> tuple[object, ...]:
    """What sizes of one rank say, as numbers to look up by."""
    said = [] if sizes is None else [getattr(sizes, each.name) for each in fields(sizes)]
    return type(sizes), *(value if isinstance(value, str) else float(value) for value in said)


def _seen_pairs(node: fx.Node, band: Band, sizes: AttentionSizes, kind: str) -> float | None:
    """Pairs that attention computes of its runs of rows and keys; None where it is causal and that of one run of rows,
    which is priced as that of the last rows on every rank."""
    names, arguments = argument_names(node.target), tuple[Any, ...](node.args)
    rows, keys = (((0, int(np.rint(size))),) for size in (sizes.queries, sizes.keys))
    if "runs" in names and names.index("runs") < len(arguments):
        rows, keys = arguments[names.index("runs")][-2:]
    if band == CAUSAL and len(rows) == 1 and len(keys) == 1 and keys[0][0] == 0:
        return None
    return pairs_in_blocks(tuple(rows), tuple(keys), band, kind)


def _flops(node: fx.Node, sizes: Sizes | None) -> float:
    """FLOPs of a product or of attention; 0 where neither sizes nor a rule say them."""
    if isinstance(sizes, ProductSizes | AttentionSizes):
        return float(flops_of(sizes))
    rule = rule_for(node)
    return 0.0 if rule is None else rule.flops


def local_bytes(node: fx.Node, traffic: Traffic) -> list[float]:
    """Bytes that a node with local `meta["val"]` moves as a member of its kernel."""
    return bytes_moved(
        node,
        traffic,
        lambda operand: sum(map(_bytes, _values(operand))),
        lambda output: sum(map(_bytes, _values(node, output))),
    )


def dtype_name(node: fx.Node) -> str:
    """The dtype in which a node computes, without "torch.": of its first output, of a product that only its statistics
    leave, of its first operand."""
    computed = tensor_operands(node)[0] if base_name(node.target) in LINEAR_LOSSES else node
    return str(_values(computed)[0].dtype).removeprefix("torch.")


def _values(node: fx.Node, output: int | None = None) -> list[torch.Tensor]:
    """The tensors of a node, or one of its outputs."""
    value = node.meta.get("val")
    outputs = value if isinstance(value, tuple | list) else (value,)
    chosen = outputs if output is None else outputs[output : output + 1]
    return [item for item in chosen if isinstance(item, torch.Tensor)]


def _bytes(value: torch.Tensor) -> float:
    return float(value.numel() * value.element_size())
