"""What a plan may put on the host is the same for the planner and for the process that runs it."""

from __future__ import annotations

import pytest

from autopar.errors import HostMemoryError
from autopar.hardware.cluster import Cluster
from autopar.plans.rung_names import host_bytes
from autopar.runtime.host_memory.host_budget import check_room, host_budget_bytes
from tests.planner.one_mesh.test_host_labels import SMALL, planned


def test_planner_and_process_count_on_the_same_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.parse("8 H100-SXM")
    assert cluster.host is not None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_budget_bytes(cluster.host.memory_bytes) == int(cluster.host.bytes_per_device(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert host_budget_bytes(cluster.host.memory_bytes) == int(cluster.host.bytes_per_device(1))


def test_a_plan_with_more_on_the_host_than_there_is_is_refused() -> None:
    plan = planned(SMALL, offload="all")
    check_room(plan)
    check_room(plan, round(host_bytes(plan.predicted)))
    with pytest.raises(HostMemoryError, match=r"puts 3.8 MiB of every device on the host, and this machine has room"):
        check_room(plan, round(host_bytes(plan.predicted)) - 1)
