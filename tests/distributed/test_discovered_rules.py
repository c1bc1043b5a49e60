"""Rules that rank 0 discovers hold on all ranks: the step computes what the plain model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.discover_jobs import Discovered
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed
JOB = "tests.distributed.discover_jobs:discover"
CUBE, CUBE_BACKWARD = "autopar_test.cube.default", "autopar_test.cube_backward.default"


def run(pool: Pool, cache: Path, plan: bytes | None = None, wrong: dict[str, str] | None = None, **options: Any) -> Any:
    return pool.run(JOB, world_size=2, timeout=120.0, cache=str(cache), plan=plan, wrong=wrong or {}, **options)


@pytest.mark.exhaustive(sample="batch")
@pytest.mark.parametrize(
    "options", [{"dims": {"dp_replicate": 2}}, {"dims": {"tp": 2}, "micro_batches": 2}], ids=["batch", "parts"]
)
def test_discovered_rules_split_the_operator_and_keep_its_gradients(
    pool: Pool, tmp_path: Path, options: dict[str, Any]
) -> None:
    first: list[Discovered] = run(pool, tmp_path, discover=True, **options)
    assert first[0].searched > 0 == first[1].searched
    again: list[Discovered] = run(pool, tmp_path / "other", plan=first[0].plan)
    assert [found.searched for found in again] == [0, 0]
    for found in (*first, *again):
        assert found.error <= 1e-5
        assert found.uncovered == ()
        assert all(axes != (None,) for axes in found.axes)
        assert found.rules == first[0].rules
        assert set(found.rules.values()) == {"a b -> a b", "a b, a b -> a b ; linear: x -"}


def test_a_wrong_rule_in_a_plan_is_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    wrong = {CUBE: "a b -> a b", CUBE_BACKWARD: "a b, a b -> a b ; linear: - x | x x"}
    plan = run(pool, tmp_path, wrong=wrong, discover=True, dims={"tp": 2})[0].plan
    for message in run(pool, tmp_path, plan=plan):
        assert message.startswith("PlanMismatchError: the plan states the rule")
        assert CUBE_BACKWARD in message
