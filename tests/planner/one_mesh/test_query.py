"""What a question works out once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.hardware.cluster import Cluster
from autopar.planner.one_mesh import query as query_module
from tests.planner.problems import captured_mlp, free_query


def test_a_program_in_parts_is_made_once_for_every_way_to_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(program: Any, count: int, *_: object) -> Any:
        made.append(count)
        return SimpleNamespace(count=count, program=program)

    monkeypatch.setattr(query_module, "in_parts", counted)
    recapture: Any = SimpleNamespace()
    query = free_query(captured_mlp(), Cluster.parse("4 cpu"))
    other_way = replace(query, gather_once=True, budget_bytes=1e9)
    found = [each.in_parts(count, recapture) for each in (query, other_way) for count in (2, 4)]
    assert made == [2, 4]
    assert found[0] is found[2]
    assert found[1] is found[3]
    replace(query, program=captured_mlp()).in_parts(2, recapture)
    assert made == [2, 4, 2], "of another program"
