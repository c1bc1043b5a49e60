"""Who has symmetric memory: reasons that a rank knows beforehand, and what torch says where it cannot map."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.step import symmetric_memory
from autopar.runtime.step.symmetric_memory import _first, _mapped, _why_not


def ranks_at(monkeypatch: pytest.MonkeyPatch, *places: tuple[str, int], reach: bool = True) -> Any:
    """Groups of this rank, the first of several on these hosts and devices."""
    monkeypatch.setattr(symmetric_memory.socket, "gethostname", lambda: places[0][0])
    monkeypatch.setattr(symmetric_memory, "gather_from_all", lambda mine, what: [mine, *places[1:]])
    monkeypatch.setattr(symmetric_memory, "resolve_group", lambda name: name)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: range(len(places)))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach)
    return SimpleNamespace(device=torch.device("cuda", places[0][1]), name=lambda symbol: f"group {symbol}")


def test_ranks_of_one_host_that_reach_each_other_have_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ranks_at(monkeypatch, ("a", 0), ("a", 1), ("a", 2))
    assert _why_not({"tp": 64}, groups) is None
    each_sees_one = ranks_at(monkeypatch, ("a", 0), ("a", 0), reach=False)
    assert _why_not({"tp": 64}, each_sees_one) is None  # their numbers say nothing


def test_several_hosts_and_devices_without_access_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    why = _why_not({"tp": 64}, ranks_at(monkeypatch, ("b", 0), ("a", 0)))
    assert why == "the ranks of tp run on several hosts (a, b)"
    why = _why_not({"tp": 64}, ranks_at(monkeypatch, ("a", 1), ("a", 3), reach=False))
    assert why == "cuda:1 has no access to the memory of cuda:3 on a"


def test_every_group_is_mapped_in_one_order_and_a_refusal_of_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ranks_at(monkeypatch, ("a", 0), ("a", 1))
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(symmetric_memory, "map_symmetric_memory", lambda group, size: asked.append((group, size)))
    assert _mapped({"tp": 64, "dp": 32}, groups) is None
    assert asked == [("group dp", 32), ("group tp", 64)]

    def refuse(group: str, size: int) -> None:
        raise RuntimeError("CUDA driver error: not supported\nand a trace")

    monkeypatch.setattr(symmetric_memory, "map_symmetric_memory", refuse)
    assert _mapped({"tp": 64}, groups) == "torch cannot map it for tp (CUDA driver error: not supported)"


def test_a_reason_of_one_rank_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "gather_from_all", lambda mine, what: [mine, "no access", ""])
    assert _first(None) == "no access"
    monkeypatch.setattr(symmetric_memory, "gather_from_all", lambda mine, what: [mine, "", ""])
    assert _first(None) is None
