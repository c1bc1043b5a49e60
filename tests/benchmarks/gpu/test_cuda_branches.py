"""What only a GPU takes of the stages runs here once: events, counters of the allocator, the name of the device.

Tensors that are asked for on "cuda" are made on the CPU, and what `torch.cuda` says is made up. What stays for a GPU
are kernels, compilers and numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from autopar.hardware.cluster import Cluster
from benchmarks.gpu.machine import facts
from benchmarks.gpu.stage import Place, Row
from benchmarks.gpu.steps import plain
from benchmarks.gpu.table import STAGES

MIB = 2**20
NAME = "NVIDIA H100 80GB HBM3"


class Event:
    """Seconds of the clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3 + 1e-6


ANSWERS: dict[str, Any] = {
    "current_device": 0,
    "device_count": 1,
    "empty_cache": None,
    "get_device_capability": (9, 0),
    "get_device_properties": SimpleNamespace(name=NAME, total_memory=80 * 1024 * MIB, multi_processor_count=132),
    "is_available": True,
    "is_bf16_supported": True,
    "max_memory_allocated": 3 * MIB,
    "max_memory_reserved": 4 * MIB,
    "mem_get_info": (79 * 1024 * MIB, 80 * 1024 * MIB),
    "memory_allocated": MIB,
    "memory_reserved": 2 * MIB,
    "reset_peak_memory_stats": None,
    "synchronize": None,
}


class MadeOnTheCpu(TorchFunctionMode):
    """Tensors of "cuda" lie on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*["cpu" if isinstance(arg, torch.device) else arg for arg in args], **kwargs)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("benchmarks.gpu.timing.FLUSHED_BYTES", 64)
    monkeypatch.setattr("benchmarks.gpu.steps.busiest_kernels", lambda step, device: [])
    for name, answer in ANSWERS.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    place = Place(device=torch.device("cuda"), rehearse=True)
    with MadeOnTheCpu():
        yield place


def rows_of(name: str, place: Place) -> dict[str, Row]:
    (stage,) = [stage for stage in STAGES if stage.name == name]
    return {row["case"]: row for row in stage.rows(place)}


@pytest.mark.parametrize("name", ["attention", "operators"])
def test_kernels_are_timed_by_events(name: str, gpu: Place) -> None:
    rows = rows_of(name, gpu)
    assert [row["error"] for row in rows.values() if "error" in row] == []
    assert all(0 < row["seconds"] < 1 for row in rows.values())


def test_memory_is_what_the_device_says(gpu: Place) -> None:
    rows = rows_of("allocator", gpu)
    assert rows["context"]["bytes"] == (1024 - 2) * MIB
    assert rows["changing sizes"]["fraction"] == pytest.approx(0.25)
    assert [row["error"] for row in rows.values() if "error" in row] == []


def test_a_profile_is_left_where_plans_of_this_device_find_it(gpu: Place) -> None:
    row = rows_of("profile", gpu)["preset"]
    assert row["tier"] == "measured"
    assert f"measured on {NAME}" in row["prices"]
    profile = Cluster.detect(1).device.profile
    assert profile is not None
    assert len(profile.kernels) == len(row["cluster"]["device"]["profile"]["kernels"]) > 3


def test_the_peak_of_a_step_is_that_of_the_allocator(gpu: Place) -> None:
    row = plain(gpu, "gpt2", 2, lambda module: module)
    assert (row["peak_bytes"], row["reserved_bytes"]) == (3 * MIB, 4 * MIB)
    assert row["seconds"] > 0


def test_a_file_names_the_gpu(gpu: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    (row,) = facts(gpu)
    assert (row["device"]["name"], row["device"]["count"]) == (NAME, 1)
    assert row["versions"]["cudnn"] == 91000
