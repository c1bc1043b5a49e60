"""Seconds of one kernel of a lowered program on a GPU: its nodes say the sizes, the operator models say the time.

    mm (4096, 2048) @ (2048, 3072)        a product: tiles, waves, K loop            operators_gemm
    autopar::attention (4, 16, 1024, 128) fused attention, forward or backward       operators_attention
    add + gelu + dropout                  the bytes of the whole kernel, once        operators_memory

A bias added in a product's kernel costs nothing of its own; a gradient of a weight that is added to its total reads and
writes that total. Devices without units and caches in the tables are priced by ceilings alone (`operators.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.cost_models.kernel_groups import Traffic
from autopar.cost_models.operator_names import LOOKUPS, base_name, operator_kind
from autopar.cost_models.operator_sizes import RowSizes, has_sizes, sizes_of, whole
from autopar.cost_models.operators import operator_seconds, rates_of
from autopar.cost_models.operators_attention import attention_curve, attention_seconds
from autopar.cost_models.operators_gemm import gemm_curve, gemm_seconds
from autopar.cost_models.operators_memory import memory_curve, memory_seconds
from autopar.cost_models.sustained import AttentionKernel, attention_speed, sustained
from autopar.device_curves import DeviceCurves, MemoryCurve
from autopar.hardware import Device

_PARTS = ("region", "piece", "trimmed", "slice", "select")
"""Operators that read only as much as they return."""
_ELEMENTWISE = RowSizes(family="elementwise")
_ELEMENT_BYTES = {"float8_e4m3fn": 1.0, "float4_e2m1fn_x2": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPrices:
    """What prices kernels. curves: None for ceilings alone; product_dtype: of matrix products, where it is not that of
    their operands (float8); gradient_bytes: of an element of the buffer to which weight gradients are added, 0: they
    are written as they are; attention: the kernel that the software calls."""

    device: Device
    curves: DeviceCurves | None = None
    product_dtype: str | None = None
    gradient_bytes: int = 0
    attention: AttentionKernel = "vendor"

    def seconds(self, nodes: Sequence[tuple[fx.Node, Traffic]], *, adds_gradient: bool = False) -> float:
        """Seconds of one kernel by its nodes (program order) and what each moves."""
        heavy = next((node for node, _ in nodes if operator_kind(node.target) != "memory"), None)
        if heavy is None:
            return self._memory(nodes)
        if self.curves is None:
            moved = sum(bytes_moved(node, traffic) for node, traffic in nodes)
            return self._ceilings(heavy, moved, product_flops(heavy))
        if operator_kind(heavy.target) == "attention":
            return self._attention(heavy)
        return self._product(heavy, adds_gradient)

    def _ceilings(self, node: fx.Node, moved: float, flops: float) -> float:
        kind = operator_kind(node.target)
        dtype = self.product_dtype if self.product_dtype and kind == "matmul" else dtype_name(node)
        return float(
            operator_seconds(
                self.device, flops=flops, bytes_moved=moved, dtype=dtype, kind=kind, operator=base_name(node.target)
            )
        )

    def _memory(self, nodes: Sequence[tuple[fx.Node, Traffic]]) -> float:
        moved = sum(bytes_moved(node, traffic) for node, traffic in nodes)
        first = nodes[0][0]
        if self.curves is None:
            return self._ceilings(first, moved, 0.0)
        sizes = next((found for node, _ in nodes if (found := row_sizes(node)) is not None), _ELEMENTWISE)
        curve = memory_curve(self.curves, sizes.family)
        if self.curves.tier == "physics":
            curve = MemoryCurve(launch_seconds=self.device.launch_seconds)
        rates = rates_of(self.device, self.curves, dtype_name(first))
        return float(memory_seconds(rates, curve, moved, row=sizes.row))

    def _product(self, node: fx.Node, adds_gradient: bool) -> float:
        assert self.curves is not None
        m, n, k, batch = product_sizes(node)
        dtype = self.product_dtype or dtype_name(node)
        element = _ELEMENT_BYTES.get(dtype, _first(node).element_size())
        is_grouped = base_name(node.target) not in ("mm", "bmm")
        variant = "grouped" if is_grouped else "batched" if batch > 1 else ""
        into_total = adds_gradient and self.gradient_bytes > 0
        seconds = gemm_seconds(
            sustained(rates_of(self.device, self.curves, dtype), self.curves),
            gemm_curve(self.curves, dtype, variant),
            m, n, k,
            batch=batch,
            element_bytes=element,
            output_bytes=self.gradient_bytes if into_total else _first(node).element_size(),
            accumulate=into_total,
        )  # fmt: skip
        return float(seconds) + (self.device.launch_seconds if self.curves.tier == "physics" else 0.0)

    def _attention(self, node: fx.Node) -> float:
        assert self.curves is not None
        backward = "backward" in base_name(node.target)
        tensors = [_shape(operand) for operand in node.all_input_nodes]
        query, key, value = tensors[1:4] if backward else tensors[:3]
        causal = any(argument is True for argument in node.args)
        rates = sustained(rates_of(self.device, self.curves, dtype_name(node)), self.curves)
        seconds = float(
            attention_seconds(
                rates,
                attention_curve(self.curves, backward),
                batch=math.prod(query[:-3]),
                heads=query[-3],
                key_heads=key[-3],
                queries=query[-2],
                keys=key[-2],
                qk_dim=query[-1],
                v_dim=value[-1],
                causal=causal,
                backward=backward,
                element_bytes=_first(node).element_size(),
            )
        )
        return seconds / attention_speed(self.attention, self.curves)


def row_sizes(node: fx.Node) -> RowSizes | None:
    """The family and row of a norm, softmax or lookup with local `meta["val"]`; None for element-wise operators."""
    name = base_name(node.target)
    if not has_sizes(name):
        return None
    operands = [_shape(operand) for operand in node.all_input_nodes]
    found = sizes_of(name, operands, _shape(node), whole(len(operands)))
    return found if isinstance(found, RowSizes) else None


def product_sizes(node: fx.Node) -> tuple[float, int, int, int]:
    """(m, n, k, batch) of a product node with local `meta["val"]`; grouped products share their rows evenly."""
    left, right = (_shape(operand) for operand in node.all_input_nodes[:2])
    name = base_name(node.target)
    if name == "mm":
        return left[0], right[1], left[1], 1
    if name == "bmm":
        return left[1], right[2], left[2], left[0]
    out = _shape(node)
    if "linear" in name:
        return left[0] / right[0], out[-1], left[1], right[0]
    if "outer" in name:
        return out[1], out[2], max(1, round(left[0] / out[0])), out[0]
    size = math.prod(out)
    return size / max(out[-1], 1), out[-1], max(1, math.prod(right) // max(out[-1], 1)), 1


def product_flops(node: fx.Node) -> float:
    """FLOPs of a product or of attention, a multiply-add as 2."""
    if operator_kind(node.target) == "matmul":
        m, n, k, batch = product_sizes(node)
        return 2.0 * m * n * k * batch
    backward = "backward" in base_name(node.target)
    tensors = [_shape(operand) for operand in node.all_input_nodes]
    query, key, value = tensors[1:4] if backward else tensors[:3]
    pairs = math.prod(query[:-1]) * key[-2]
    return float(pairs * (6 * query[-1] + 4 * value[-1] if backward else 2 * (query[-1] + value[-1])))


def bytes_moved(node: fx.Node, traffic: Traffic) -> float:
    """Bytes that a node reads from and writes to memory, as a member of its kernel."""
    name = base_name(node.target)
    operands = node.all_input_nodes
    total = 0.0
    for read in traffic.reads:
        partly = name in _PARTS or (name in LOOKUPS and read is operands[0])
        total += _value_bytes(node, 0) if partly else _value_bytes(read)
    return total + sum(_value_bytes(node, output) for output in traffic.writes)


def dtype_name(node: fx.Node) -> str:
    """The dtype of a node's first output, without "torch."."""
    return str(_first(node).dtype).removeprefix("torch.")


def _value_bytes(node: fx.Node, output: int | None = None) -> float:
    value = node.meta.get("val")
    if isinstance(value, tuple):
        chosen = value if output is None else value[output : output + 1]
        return float(sum(item.numel() * item.element_size() for item in chosen if item is not None))
    return float(value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else 0.0


def _first(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    found = next(item for item in (value if isinstance(value, tuple) else (value,)) if item is not None)
    assert isinstance(found, torch.Tensor)
    return found


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(_first(node).shape)
