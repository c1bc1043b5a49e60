"""Bad input on several processes: every rank raises the same kind of error, and nobody waits for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.bad_input_jobs:"
SECONDS = 60.0


@pytest.mark.exhaustive(sample="drop_operator")
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ("flip_output", ("block.0/mm#0", "P(sum)")),
        ("flip_axes", ("block.0/mm#0", "(q)")),
        ("drop_operator", ("no entry for block.0/mm#0",)),
        ("drop_parameter", ("block.0.weight",)),
        ("impossible_parameter", ("block.0.weight", "S(3)")),
        ("too_many_axes", ("parameters.block.0.weight.stored has 2 placements",)),
    ],
)
def test_an_inconsistent_edit_names_the_operator_and_the_layout(
    pool: Pool, tmp_path: Path, edit: str, words: tuple[str, ...]
) -> None:
    for message in pool.run(JOBS + "edited_plan", timeout=SECONDS, path=str(tmp_path / "plan"), edit=edit):
        error = "ConfigurationError" if edit == "too_many_axes" else "PlanMismatchError"  # the file alone says so
        assert message.startswith(f"{error}: ")
        assert all(word in message for word in words), message


def test_a_plan_for_four_on_two_is_refused_by_both(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    pool.run(JOBS + "save_plan", path=path)
    for message in pool.run(JOBS + "world_size_error", world_size=2, timeout=SECONDS, path=path):
        assert message.startswith("PlanMismatchError: the plan is for 4 devices")
        assert "2 processes are running: start 4" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dims": {"tp": 3}}, "ConfigurationError: dims {'tp': 3} (product 3) do not divide 4 devices"),
        ({"memory_limit": 100}, "InfeasibleError: no plan fits 100 B per device on 4 devices"),
        ({"cluster": "8 H100-SXM"}, "ConfigurationError: cluster"),
    ],
    ids=["dims", "memory", "cluster"],
)
def test_an_impossible_request_is_refused_by_all(pool: Pool, options: dict[str, Any], words: str) -> None:
    for message in pool.run(JOBS + "impossible", timeout=SECONDS, options=options):
        assert message.startswith(words)


def test_a_file_that_is_damaged_for_one_rank_stops_all(pool: Pool, tmp_path: Path) -> None:
    messages = pool.run(JOBS + "damaged_file", timeout=SECONDS, path=str(tmp_path / "plan"))
    assert "is damaged" in messages[1]
    assert all("rank 1" in messages[rank] for rank in (0, 2, 3)), messages


def test_ranks_with_different_plans_say_so(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run(JOBS + "different_plans", timeout=SECONDS, path=str(tmp_path / "plan")):
        assert message.startswith("RankMismatchError: ranks 3"), message


@pytest.mark.parametrize("dims", [{"dp_shard": 4}, {"tp": 4}], ids=str)
def test_an_operator_without_a_rule_runs_whole_and_right(pool: Pool, dims: dict[str, int]) -> None:
    for error, names, seconds in pool.run(JOBS + "uncovered", timeout=SECONDS, dims=dims):
        assert error <= 1e-5
        assert len(names) == 2
        assert seconds > 0.0


def test_strict_refuses_it_on_all_ranks(pool: Pool) -> None:
    for message in pool.run(JOBS + "uncovered_strict", timeout=SECONDS):
        assert message.startswith("UnsupportedOperatorError: ")
        assert "cube" in message
