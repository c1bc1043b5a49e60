"""Mixtures of experts on four processes: the plain model's loss and gradients, no product computed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.request.expert_load import load_shares
from tests.distributed.expert_jobs import ExpertParity
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed


@pytest.mark.exhaustive(sample="one_hot-mesh0")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("one_hot", (4,)),
        ("assigned", (4,)),
        ("masks", (2, 2)),
        pytest.param("olmoe", (4,), marks=pytest.mark.slow),
        pytest.param("gpt_oss", (4,), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", (4,), marks=pytest.mark.slow),
    ],
)
def test_experts_are_split_and_compute_the_same(pool: Pool, name: str, mesh: tuple[int, ...]) -> None:
    job = "tests.distributed.expert_jobs:parity"
    results: list[ExpertParity] = pool.run(job, world_size=4, timeout=300.0, name=name, mesh=mesh)
    for found in results:
        assert found.agreement.agrees, found.agreement
        assert found.share == 0.0
        assert any(placement.startswith("S") for layout in found.splits.values() for placement in layout)


@pytest.mark.exhaustive(sample=["hits-dims0", "hits-dims1"])
@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("hits", {"ep": 4}),
        ("hits", {"ep": 2, "ep_inner": 2}),
        pytest.param("mixtral", {"dp_shard": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"ep": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_rows_travel_to_their_experts_and_back(pool: Pool, name: str, dims: dict[str, int], tmp_path: Path) -> None:
    job, log = "tests.distributed.expert_jobs:dispatched", str(tmp_path / "run.jsonl")
    results: list[Any] = pool.run(job, world_size=4, timeout=300.0, name=name, dims=dims, log=log)
    rows = load_shares(log, dict.fromkeys(results[0][2], 4))
    assert rows, "the log is a load"
    assert [sum(shares) for shares in rows.values()] == pytest.approx([1.0] * len(rows))
    for agreement, products, _ in results:
        assert agreement.agrees, agreement
        assert all("t+e" in axes for axes in products)


def test_rows_beyond_a_capacity_are_dropped_and_counted(pool: Pool, tmp_path: Path) -> None:
    results: list[Any] = pool.run("tests.distributed.expert_jobs:capped", world_size=4, log=str(tmp_path / "run.jsonl"))
    for agreement, products, _, _ in results:
        assert agreement.agrees, agreement
        assert products == {("t+e",)}
    _, _, counted, wanted = results[0]
    assert counted == wanted != [0] * 8
