"""Where nothing fits, the error names the rung of the memory ladder that would, and that rung then plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InfeasibleError
from autopar.explain.recovered import query_of
from autopar.hardware.cluster import Cluster
from autopar.planner.meshes.least_memory import least_product_bytes
from autopar.plans.plan_text import format_bytes
from autopar.plans.rung_names import host_bytes
from tests.planner.one_mesh.test_host_labels import SAVED, SMALL, STATES, WIDTH, Blocks, chain, cluster

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "states": (lambda: chain()[0], SMALL),
    "values": (lambda: chain()[0], STATES + 4 * SAVED),
    "blocks": (lambda: Blocks().double(), 30 * SAVED),
}
"""Model, and a limit that it does not fit within by itself."""


def asked(name: str, host: Cluster, **options: Any) -> autopar.Plan:
    make, limit = MODELS[name]
    return autopar.plan(
        make(), chain()[1], cluster=host, optimizer=torch.optim.AdamW, memory_limit=f"{limit}B", micro_batches=1,
        with_baselines=False, **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_the_rung_that_an_error_names_plans(name: str) -> None:
    options = {"recompute": "none"} if name == "values" else {}
    with pytest.raises(InfeasibleError) as failed:
        asked(name, cluster(), **options)
    found = re.search(r"fits with offload='(\w+)' \([^,]*, [^,]* of the ([^,]*) that a device has", str(failed.value))
    assert found is not None, str(failed.value)
    plan = asked(name, cluster(), offload=found[1], **options)
    assert plan.predicted.peak_bytes <= MODELS[name][1]
    assert host_bytes(plan.predicted) > 0
    host = cluster().host
    assert host is not None
    assert found[2] == format_bytes(host.bytes_per_device(1))


@pytest.mark.slow
def test_without_a_host_none_is_named() -> None:
    with pytest.raises(InfeasibleError) as failed:
        asked("states", Cluster.parse("1 cpu"))
    assert "offload" not in str(failed.value)


def test_ways_of_recomputing_say_what_they_need() -> None:
    with pytest.raises(InfeasibleError, match=r"the least, block by block .* MiB, in spans of blocks \d"):
        asked("states", Cluster.parse("1 cpu"), mode="fast")


@pytest.mark.slow
def test_a_host_without_room_is_no_way_out() -> None:
    host = cluster().host
    assert host is not None
    small = replace(cluster(), host=replace(host, memory_bytes=STATES // 8))
    with pytest.raises(InfeasibleError, match=r"Not enough.*offload='all'"):
        asked("states", small)


def test_what_a_product_reads_and_writes_is_a_bound_that_no_plan_is_under() -> None:
    model, x = chain()
    planner = autopar.Planner(model, x, cluster=cluster(), optimizer=torch.optim.AdamW)
    plan = planner.plan(memory_limit=f"{SMALL}B", micro_batches=1, offload="all")
    query = query_of(plan.origin.source, plan)  # type: ignore[union-attr]
    least = least_product_bytes(query)
    assert least == 2 * SAVED + WIDTH * WIDTH * 8
    assert least <= plan.predicted.peak_bytes
