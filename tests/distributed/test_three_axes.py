"""Meshes of three axes on eight processes: parity with the plain model, and checkpoints into meshes of fewer axes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.parity_jobs import Parity
from tests.distributed.pool import Pool, forked

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PROCESSES = 8
NAMED = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
CASES: dict[str, dict[str, Any]] = {
    "three named axes": {"dims": NAMED},
    "a free axis beside named ones": {"dims": {"dp_shard": 2, "tp": 2}},
    "three free axes": {"mesh": (2, 2, 2), "mode": "fast"},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "three named axes": ("one_layer", {}),
    "three free axes": ("one_layer", {}),
    "a free axis beside named ones": ("zoo", {"name": "llama"}),
}
"""Case -> job and its arguments. Planning and eight lowered programs take seconds per case and layer."""


@pytest.fixture(scope="module")
def eight() -> Iterator[Pool]:
    """Eight workers."""
    workers = forked(PROCESSES)
    yield workers
    workers.close()


@pytest.mark.exhaustive(sample="three free axes")
@pytest.mark.parametrize("case", CASES)
def test_plans_on_three_axes_compute_what_the_plain_model_computes(eight: Pool, case: str) -> None:
    job, arguments = MODELS[case]
    job, cases = f"tests.distributed.parity_jobs:{job}", {case: CASES[case]}
    results: list[dict[str, Parity]] = eight.run(job, world_size=PROCESSES, timeout=300.0, cases=cases, **arguments)
    for found in results:
        assert found[case].agreement.agrees, found[case].agreement
    placements = results[0][case].placements
    assert all(len(layout) == 3 for layout in placements.values())
    if case == "three named axes":
        assert all(layout[0] == "R" for layout in placements.values())
        assert any(layout[1] != "R" and layout[2] != "R" for layout in placements.values())


@pytest.mark.exhaustive
def test_a_checkpoint_of_three_axes_goes_on_under_one(eight: Pool, tmp_path: Path) -> None:
    path, jobs = str(tmp_path / "checkpoint"), "tests.distributed.checkpoint_jobs:"
    saved = eight.run(jobs + "save", world_size=8, path=path, dims=NAMED, dropout=0.2)
    loaded = eight.run(jobs + "load", world_size=2, path=path, dims={"tp": 2}, dropout=0.2)
    assert loaded[0] == pytest.approx(saved[0], rel=1e-4)
    back = eight.run(jobs + "load", world_size=8, path=path, dims=NAMED, dropout=0.2)
    assert back[0] == pytest.approx(saved[0], rel=1e-4)


def test_strided_layouts_on_three_axes_survive_full_tensor_and_files(eight: Pool, tmp_path: Path) -> None:
    job = "tests.distributed.checkpoint_jobs:strided_round_trip_on_three_axes"
    assert max(eight.run(job, world_size=8, path=str(tmp_path / "w"))) == 0.0
