"""Emitted steps on fake CUDA tensors are the planned ones, and what is not as planned is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from autopar.capture import Captures, capture
from autopar.demo.gpt import GPT, GPTConfig
from autopar.hardware.cluster import Cluster
from autopar.ops import attention_kernels, attention_math, attention_operator, tiled_mlp
from autopar.planner.planning import make_plan
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.questions import capture_model
from autopar.request import Request
from autopar.runtime.collectives import host_graphs
from benchmarks.fake_cuda.checks import faults, planned_bytes
from benchmarks.fake_cuda.rank_step import Record, run_rank
from benchmarks.vision import ResNet, UNet
from tests.passes.tokens import FLAT, Gated, split_as_megatron_does

BATCH, LENGTH, VOCABULARY = 16, 512, 512
"""Long enough that scores are larger than what they are made of."""


@cache
def planned(model: str, devices: int) -> tuple[Program, Plan]:
    """A model on H100s, as the planner likes it best."""
    with torch.device("meta"):
        module, inputs = MODELS[model]()
    request = Request(cluster=_cluster(devices), optimizer=AdamW, with_baselines=False)
    captured = capture_model(module.bfloat16(), (), inputs, request, Captures(), training=True)
    return captured.program, make_plan(captured.program, request)


def _cluster(devices: int) -> Cluster:
    return Cluster.parse(f"{devices} H100-SXM")


def _gpt() -> tuple[nn.Module, dict[str, Any]]:
    shape = GPTConfig(vocabulary=VOCABULARY, positions=LENGTH, width=128, heads=4, layers=2)
    return GPT(shape), {name: torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for name in ("tokens", "labels")}


def _unet() -> tuple[nn.Module, dict[str, Any]]:
    images = torch.randn(8, 3, 64, 64, dtype=torch.bfloat16)
    return UNet(channels=(32, 64), classes=5), {"images": images, "masks": torch.randint(0, 5, (8, 64, 64))}


def _resnet() -> tuple[nn.Module, dict[str, Any]]:
    images = torch.randn(16, 3, 64, 64, dtype=torch.bfloat16)
    return ResNet(width=16, blocks=(1, 1), classes=8), {"images": images, "labels": torch.randint(0, 8, (16,))}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {"gpt": _gpt, "unet": _unet, "resnet": _resnet}


def _record(model: str, devices: int, rank: int = 0) -> Record:
    return run_rank(*planned(model, devices), AdamW, rank)


def _faults(record: Record) -> list[str]:
    device, program = _cluster(1).device, record.lowered.program
    return faults(record, planned_bytes(record.lowered, state_bytes(program, AdamW, device.kind), device))


@pytest.mark.parametrize(("model", "devices", "rank"), [("gpt", 1, 0), ("gpt", 8, 5), ("unet", 2, 1), ("resnet", 4, 3)])
def test_a_step_holds_and_runs_what_was_planned(model: str, devices: int, rank: int) -> None:
    record = _record(model, devices, rank)
    assert _faults(record) == []
    assert {call.devices for call in record.calls if call.devices} == {("cuda",)}


class Spoken(nn.Module):
    """A CTC loss of a weight with strides that its operator has to keep, and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.idle = nn.Linear(32, 1024)

    def forward(self, tokens: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        windows = hidden.as_strided((hidden.shape[0], 3, 8, 32), (16 * 32, 4 * 32, 32, 1))
        chances = self.head(windows.sum(1)).float().log_softmax(-1).transpose(0, 1)
        return nn.functional.ctc_loss(chances, targets, torch.full_like(lengths, 8), lengths)


def test_a_loss_whose_shapes_are_data_and_a_copy_with_strides_run() -> None:
    inputs = {
        "tokens": torch.randint(0, 64, (4, 16)),
        "targets": torch.randint(1, 64, (4, 3)),
        "lengths": torch.tensor([3, 3, 2, 3]),
    }
    request = Request(cluster=_cluster(1), optimizer=AdamW, with_baselines=False)
    captured = capture_model(Spoken().bfloat16(), (), inputs, request, Captures(), training=True)
    record = run_rank(captured.program, make_plan(captured.program, request), AdamW)
    names = [call.name for call in record.calls]
    assert "ctc_loss_backward" in names
    assert any("with_strides" in str(turn.node.target) for turn in record.turns)
    waits = {fault.split(" in ")[0] for fault in _faults(record) if "the host waits" in fault}
    assert waits == {"the host waits for ctc_loss", "the host waits for ctc_loss_backward"}
    assert not [fault for fault in _faults(record) if "hold" in fault]


class LongRows(nn.Module):
    """A gated MLP and a plain one over 16,384 rows: four tiles, whose hidden tensors would take 32 MiB each whole."""

    def __init__(self) -> None:
        super().__init__()
        into, behind = ((256, 1024), (1024, 256))
        self.gate, self.up, self.fc = nn.Linear(*into, bias=False), nn.Linear(*into, bias=False), nn.Linear(*into)
        self.down, self.out, self.first = nn.Linear(*behind, bias=False), nn.Linear(*behind), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return (x + self.out(nn.functional.gelu(self.fc(x)))).square().mean()


def tiled(devices: int) -> tuple[Program, Plan]:
    asked = {"dims": {"tp": devices}} if devices > 1 else {}
    request = Request(
        cluster=_cluster(devices), optimizer=AdamW, with_baselines=False, kernels=("gated", "tiled_mlp"), **asked
    )
    inputs = {"x": torch.empty(16384, 256, dtype=torch.bfloat16, device="meta")}
    with torch.device("meta"):
        module = LongRows().bfloat16()
    captured = capture_model(module, (), inputs, request, Captures(), training=True)
    return captured.program, make_plan(captured.program, request)


@pytest.mark.parametrize("devices", [1, 2])
def test_mlps_in_tiles_hold_what_was_planned(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = tiled(devices)
    record = run_rank(program, plan, AdamW)
    assert [call.name for call in record.calls if call.turn is not None].count("mm") > 8 * 4, "tiles are not seen"
    assert _faults(record) == []
    monkeypatch.setattr(tiled_mlp, "tile_rows", lambda rows, width: rows)
    assert any("hold" in fault for fault in _faults(run_rank(program, plan, AdamW))), "whole rows are not seen"


def test_a_formula_in_the_place_of_a_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "KERNELS", {})
    monkeypatch.setattr(attention_math, "_is_indexed", lambda query, options: False)
    found = _faults(_record("gpt", 1))
    assert any("attention#0 makes a value of 64.0 MiB" in fault for fault in found), found
    assert any("forward and backward hold" in fault for fault in found), found


def test_a_copy_to_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(query: Tensor, *others: Any) -> Any:
        torch.ops.aten._to_copy(query, device="cpu")
        return attention_math.attend(query, *others)

    monkeypatch.setattr(attention_operator, "attend", attend)
    assert any("the host waits for _to_copy in layers.0" in fault for fault in _faults(_record("gpt", 1)))


def test_what_waits_on_the_host_is_not_on_the_device() -> None:
    program, free = planned("gpt", 1)
    limit = f"{int(0.7 * free.predicted.peak_bytes)}B"
    request = Request(
        cluster=_cluster(1), optimizer=AdamW, with_baselines=False, memory_limit=limit, offload="all",
        recompute="none", mode="fast", kernels=free.kernels, micro_batches=1,
    )  # fmt: skip
    plan = make_plan(program, request)
    assert plan.saved_on_host
    assert any(each.stored_on == "host" for each in plan.parameters.values())
    record = run_rank(program, plan, AdamW)
    assert _faults(record) == []
    here = {name: replace(chosen, saved_on="device") for name, chosen in plan.operators.items()}
    kept = run_rank(program, replace(plan, operators=here), AdamW)
    assert any("hold" in fault for fault in _faults(replace(kept, lowered=record.lowered)))


def test_a_second_buffer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def attend(query: Tensor, *others: Any) -> Any:
        held.append(torch.empty_like(query))
        return attention_math.attend(query, *others)

    monkeypatch.setattr(attention_operator, "attend", attend)
    assert any("forward and backward hold" in fault for fault in _faults(_record("gpt", 1)))


@cache
def in_symmetric_memory() -> tuple[Program, Plan]:
    """A gated layer on four GPUs, its products with their collectives in symmetric memory."""
    with torch.device("meta"):
        model = Gated(512, 2048).bfloat16()
        inputs = {name: torch.randn(2, 1024, 512, dtype=torch.bfloat16) for name in ("x", "y")}
    program = capture(model, (), inputs)
    groups = {"all_gather": ("tp",), "reduce_scatter": ("tp",)}
    return program, replace(split_as_megatron_does(program, FLAT, 1), symmetric_memory=groups)


def test_products_in_symmetric_memory_are_calls_of_torch_that_make_what_was_planned() -> None:
    record = run_rank(*in_symmetric_memory(), AdamW, 1)
    fused = [call.name for call in record.calls if call.name.startswith("fused")]
    gather, scatter = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
    assert fused == [gather, scatter, gather, scatter, scatter]
    assert [fault for fault in _faults(record) if " hold " not in fault] == []
    block = 2 * 1024 * 512 // 4 * 2  # bytes: gathers map a rank's rows, scatters two parts of a product
    assert [storage.bytes for storage in record.storages if storage.turn is None].count(2 * block) == 1
    planned = planned_bytes(record.lowered, state_bytes(record.lowered.only.program, AdamW, "cuda"), _cluster(1).device)
    whole = 8 * block  # what torch holds inside of a call is planned, and no storage here
    assert record.step_bytes <= planned.step <= record.step_bytes + whole


def test_a_call_that_makes_another_dtype_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scattered = host_graphs.product_scattered
    monkeypatch.setattr(host_graphs, "product_scattered", lambda *arguments: scattered(*arguments).float())
    assert any("float32" in fault for fault in _faults(run_rank(*in_symmetric_memory(), AdamW, 1)))
