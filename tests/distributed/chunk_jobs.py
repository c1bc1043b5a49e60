"""Job of the workers that run plans with tensor parallelism whose products are cut into chunks."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.ops.row_chunks import rows_joined
from autopar.plans.parallel_plan import Plan
from autopar.runtime.kernels.named_calls import NamedGraph
from benchmarks.agreement import Agreement, compare, reference
from benchmarks.zoo.registry import Inputs, zoo_model
from tests.distributed.captured_once import capture_once, compile_once, prepared_by


def captured(name: str, **_: Any) -> bool:
    """Capture a model."""
    return capture_once(f"zoo {name}", *_model(name))


@prepared_by(captured)
def in_chunks(name: str, chunks: int) -> tuple[Agreement, int]:
    """Agreement of a tensor-parallel plan in so many chunks with the plain model, and the products that were cut."""
    torch.manual_seed(0)
    model, inputs = _model(name)
    expected = reference(model, inputs)
    plan = compile_once(f"zoo {name}", copy.deepcopy(model), inputs, dims={"tp": 4}, mode="fast").plan
    assert isinstance(plan, Plan)
    counts = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), chunks)
    cut = replace(plan, bucket_bytes={}, product_chunks=counts)
    module = compile_once(f"zoo {name}", copy.deepcopy(model), inputs, plan=cut)
    agreement = compare(module, inputs, expected)
    step, _ = module.step_for((), inputs)
    graphs = [call.graph_module for call in (step.forward, step.backward) if isinstance(call, NamedGraph)]
    return agreement, sum(node.target is rows_joined for graph in graphs for node in graph.graph.nodes)


class Mlp(nn.Module):
    """Two wide layers: column-parallel, then row-parallel. forward(x (B, 64), y (B, 64)) -> mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def _model(name: str) -> tuple[nn.Module, Inputs]:
    if name != "mlp":
        return zoo_model(name)
    return Mlp(), {"x": torch.randn(32, 64), "y": torch.randn(32, 64)}
