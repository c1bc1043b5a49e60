"""The search under the memory limit: the moments that it counts stay in the order of time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.planner.one_mesh.within_memory import WithinMemory

MOMENTS = 200


def test_moments_that_are_found_too_full_take_their_place_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is full at the end, the first solution at two earlier moments, and the next one at none but those."""
    fullest = iter(([MOMENTS - 1], [130, 3], [3]))
    asked: list[list[int]] = []
    model = SimpleNamespace(
        over_time=lambda labels: np.full(MOMENTS, 2.0),
        fullest_positions=lambda plans: next(fullest),
        rows=lambda positions, budget, beyond: tuple(positions),
    )

    def solve(self: WithinMemory, rows: tuple[Any, ...], positions: list[int]) -> Any:
        assert list(rows) == list(positions)
        asked.append(list(positions))
        return SimpleNamespace(assignment=np.zeros(1, dtype=np.int64))

    monkeypatch.setattr(WithinMemory, "_solve", solve)
    parts: dict[str, Any] = {
        "query": SimpleNamespace(budget_bytes=1.0),
        "mesh": None,
        "plain": None,
        "built": None,
        "lifetimes": None,
    }
    search = WithinMemory(
        **parts, starts=[], models={id(None): model}, beyond=np.zeros(MOMENTS), known=[], prices={}, began=0.0
    )
    search.solve()
    assert asked == [[MOMENTS - 1], [3, 130, MOMENTS - 1]]
