"""Jobs of workers that run plans in chunks: products beside collectives of their rows, experts whose rows travel."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ops.row_chunks import rows_joined
from autopar.plans.parallel_plan import Plan
from autopar.runtime.kernels.named_calls import NamedGraph
from benchmarks.agreement import Agreement, compare, loss_of, reference
from benchmarks.zoo.registry import Inputs, zoo_model
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.passes.kernels.test_dispatched_rows import BATCH, CHOSEN, TOKENS, WIDTH, Chosen, routed


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


def captured_experts(**_: Any) -> bool:
    """Capture a layer of experts."""
    return capture_once("chosen experts", *_experts("even"))


@prepared_by(captured_experts)
def experts_in_chunks(kind: str, chunks: int) -> tuple[Agreement, bool, int]:
    """Agreement, with the plain model, of experts in fp64 whose rows travel in so many chunks; whether a second step
    has equal bits, and the products of forward."""
    torch.manual_seed(0)
    model, inputs = _experts(kind)
    expected = reference(model, inputs)
    asked: dict[str, Any] = {"dims": {"ep": dist.get_world_size()}, "ep": "dispatch", "mode": "fast"}
    plan = compile_once("chosen experts", copy.deepcopy(model), inputs, **asked).plan
    assert isinstance(plan, Plan)
    cut = replace(plan, bucket_bytes={}, product_chunks={"all_to_all": chunks})
    module = compile_once("chosen experts", copy.deepcopy(model), inputs, plan=cut)
    agreement = compare(module, inputs, expected)
    first, second = _gradients(module, inputs), _gradients(module, inputs)
    same = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    step, _ = module.step_for((), inputs)
    assert isinstance(step.forward, NamedGraph)
    products = sum("sorted_expert" in str(node.target) for node in step.forward.graph_module.graph.nodes)
    return agreement, same, products


def _gradients(module: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    module.zero_grad()
    loss_of(module(**inputs)).backward()  # type: ignore[no-untyped-call]
    return [each.grad.to_local() for each in module.parameters() if isinstance(each.grad, DTensor)]


def _experts(kind: str) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    tokens = (BATCH, TOKENS)
    x, weights = torch.randn(*tokens, WIDTH).double(), torch.rand(*tokens, CHOSEN).double()
    return Chosen(8).double(), {"x": x, "weights": weights, "chosen": routed(kind, 8)}


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
