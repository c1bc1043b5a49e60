"""Job of the workers that run products in symmetric memory, by what torch computes where no GPU maps any."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from autopar._compat import symmetric_memory as torch_symmetric
from autopar.capture import capture
from autopar.layouts.placement import Mesh
from autopar.ops import symmetric_products
from autopar.ops.symmetric_products import SYMMETRIC
from autopar.plans.parallel_plan import Plan
from autopar.runtime.collectives import host_graphs
from autopar.runtime.kernels.named_calls import NamedGraph
from autopar.runtime.step import symmetric_memory
from benchmarks.agreement import Agreement, compare, reference
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.passes.tokens import WIDTH, Gated, split_as_megatron_does

GROUPS = {"all_gather": ("tp",), "reduce_scatter": ("tp",)}
_REGISTERED: list[torch.library.Library] = []


def captured(**_: Any) -> bool:
    """Capture the model."""
    return capture_once("gated", *_model())


@contextmanager
def mapped_on_cpus() -> Iterator[list[str]]:
    """Torch's operators take CPU tensors, by its own fallbacks (its test mode knows CUDA alone), and processes on CPUs
    count as having symmetric memory; yields the groups that were mapped."""
    if not _REGISTERED:
        library = torch.library.Library("symm_mem", "IMPL")
        library.impl("fused_all_gather_matmul", torch_symmetric._fused_all_gather_matmul_fallback, "CPU")
        library.impl("fused_matmul_reduce_scatter", torch_symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
        _REGISTERED.append(library)
    found: list[str] = []
    with (
        mock.patch.object(symmetric_memory, "_why_not", return_value=None),
        mock.patch.object(symmetric_memory, "map_symmetric_memory", lambda group, nbytes: found.append(group)),
    ):
        yield found


@prepared_by(captured)
def in_symmetric_memory(dim: int, micro_batches: int = 1, mutation: str = "") -> tuple[Agreement, list[str], int]:
    """Agreement with the plain model, the calls that ran, and how many groups were mapped."""
    model, inputs = _model()
    plan = _plan(dim, micro_batches)
    ran: list[str] = []
    with mapped_on_cpus() as mapped, _noted(ran), _mutated(mutation):
        module = compile_once("gated", copy.deepcopy(model), inputs, plan=plan)
        agreement = compare(module, inputs, reference(model, inputs))
    return agreement, ran, len(mapped)


@prepared_by(captured)
def without_symmetric_memory(dim: int) -> tuple[Agreement, list[str], bool]:
    """As it is on CPUs: agreement, what was said, and whether the step still has such a call."""
    model, inputs = _model()
    said: list[str] = []
    with mock.patch.object(symmetric_memory.log, "warning", lambda text, *words: said.append(text % words)):
        module = compile_once("gated", copy.deepcopy(model), inputs, plan=_plan(dim))
        agreement = compare(module, inputs, reference(model, inputs))
    step, _ = module.step_for((), inputs)
    graphs = [call.graph_module for call in (step.forward, step.backward) if isinstance(call, NamedGraph)]
    calls = [node for graph in graphs for node in graph.graph.nodes if node.target in (*SYMMETRIC, *_WRAPPED)]
    return agreement, said, bool(calls)


_WRAPPED = (host_graphs.gathered, host_graphs.scattered)


def _model() -> tuple[Gated, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Gated(), {name: torch.randn(8, 4, WIDTH) for name in ("x", "y")}


def _plan(dim: int, micro_batches: int = 1) -> Plan:
    model, inputs = _model()
    asked = {"dims": {"tp": 2}, "mode": "fast", "micro_batches": micro_batches}
    chosen = compile_once("gated", copy.deepcopy(model), inputs, **asked).plan
    assert isinstance(chosen, Plan)
    plan = split_as_megatron_does(capture(model, (), inputs), Mesh(("tp",), (2,)), dim)
    return replace(
        plan, fingerprint=chosen.fingerprint, micro_batches=chosen.micro_batches, symmetric_memory=GROUPS
    )


@contextmanager
def _noted(ran: list[str]) -> Iterator[None]:
    """Write down which calls run."""
    record = host_graphs._record

    def noted(kind: str, *rest: Any) -> None:
        if kind in ("gathered_products", "product_scattered"):
            ran.append(f"{kind} of {rest[-1]}")
        record(kind, *rest)

    with mock.patch.object(host_graphs, "_record", noted):
        yield


@contextmanager
def _mutated(name: str) -> Iterator[None]:
    """A fault in the operators' arguments, as the lowering could make it."""
    scattered, gathered = symmetric_products.product_scattered, symmetric_products.gathered_products
    faults = {
        "reduction": ("product_scattered", lambda x, w, lead, dim, op, group: scattered(x, w, lead, dim, "avg", group)),
        "scatter dim": ("product_scattered", lambda x, w, lead, dim, *rest: scattered(x, w, lead, 0, *rest)),
        "gather dim": ("gathered_products", lambda x, w, lead, dim, *rest: gathered(x, w, lead, 0, *rest)),
    }
    if not name:
        yield
        return
    target, fault = faults[name]
    with mock.patch.object(host_graphs, target, fault):
        yield
