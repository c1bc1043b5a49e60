"""What autopar takes from torch that no documentation promises: is it there, and does it do its work on this device?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _compat
from benchmarks.gpu.stage import Place, Row, attempted

FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""Operators that `ops/attention_kernels.py` calls with positional arguments: their schemas are kept."""


def run(place: Place, width: int) -> Iterator[Row]:
    """Every symbol by name, then what the most used ones do on the device. width: of the tensors."""
    for name in _compat.__all__:
        if getattr(_compat, name, None) is None:
            yield {"case": name, "error": f"autopar._compat.{name} is missing"}
    yield {"case": "symbols", "count": len(_compat.__all__)}
    for name in FUSED_ATTENTION:
        yield attempted(name, partial(_schema, name))
    for name, check in CHECKS.items():
        yield attempted(name, partial(check, place.device, width))


def _schema(name: str) -> Row:
    return {"schema": str(getattr(torch.ops.aten, name).default._schema)}


def _joint_export(device: torch.device, width: int) -> Row:
    layer, x = nn.Linear(width, width, device=device), torch.randn(width, width, device=device, requires_grad=True)
    with contextlib.ExitStack() as stack:
        joint = _compat.aot_export_joint_with_descriptors(stack, layer, (x,), decompositions={})
    graph = joint.graph_module.graph
    kinds = [type(node.meta["desc"]).__name__ for node in graph.nodes if node.op == "placeholder"]
    return {"placeholders": kinds, "devices": sorted({str(node.meta["val"].device) for node in graph.nodes
                                                      if isinstance(node.meta.get("val"), Tensor)})}  # fmt: skip


def _compile_fx(device: torch.device, width: int) -> Row:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    value = torch.randn(width, width, device=device)
    (found,) = _compat.compile_fx(torch.fx.GraphModule({}, graph), [value])(value)
    torch.testing.assert_close(found, value.sin())
    return {"cache": str(_compat.compilation_folder())}


def _grouped_mm(device: torch.device, width: int) -> Row:
    rows = torch.randn(4 * width, width, device=device, dtype=torch.bfloat16)
    weights = torch.randn(4, width, width, device=device, dtype=torch.bfloat16)
    ends = torch.arange(width, 4 * width + 1, width, device=device, dtype=torch.int32)
    found = _compat.grouped_mm(rows, weights, offs=ends)
    wanted = torch.cat([part @ weight for part, weight in zip(torch.split(rows, width), weights, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0.5)
    return {"largest_difference": float((found - wanted).abs().max())}


def _device_mesh(device: torch.device, width: int) -> Row:
    return {"mesh": str(_compat.lone_device_mesh(device.type, ("dp_shard", "tp")))}


def _fused_adamw(device: torch.device, width: int) -> Row:
    parameter = nn.Parameter(torch.ones(width, width, device=device))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()
    return {"updated": float(parameter.detach().mean())}


CHECKS: dict[str, Callable[[torch.device, int], Any]] = {
    "joint export": _joint_export,
    "compile_fx": _compile_fx,
    "grouped_mm": _grouped_mm,
    "device mesh of one process": _device_mesh,
    "fused AdamW": _fused_adamw,
}
"""Case -> what it does on a device, with tensors of a width."""
