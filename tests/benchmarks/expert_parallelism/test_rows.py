"""What the benchmark of expert parallelism makes of its runs."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import AutoparError
from benchmarks.expert_parallelism.alternatives import BLIND
from benchmarks.expert_parallelism.rows import busiest, busiest_error, busiest_rank, row, summary
from benchmarks.plan_quality.plans import SAME_AS

EVEN, SKEWED = [[0, 10], [10, 0]], [[0, 10], [14, 0]]


def run(name: str, seconds: float, links: list[list[int]], *, ours: bool = True, loss: float = 1.0) -> dict[str, Any]:
    predicted = {"seconds": 1.0, "sent_bytes": [10.0, 10.0], "link_bytes": EVEN}
    return {
        "name": name, "plan": name, "seconds": seconds, "steps": [seconds] * 5, "link_bytes": links,
        "losses": [loss] * 6, "predicted": predicted if ours else None,
    }  # fmt: skip


RUNS = [
    run("autopar as dispatch", 1.0, SKEWED),
    run("by hand", 1.1, EVEN, ours=False),
    run("autopar", 1.2, EVEN),
    run("wrong", 1.3, EVEN, loss=1.1),
]


def test_a_link_is_a_nodes_way_in_or_out() -> None:
    assert busiest([[0, 1, 2], [3, 0, 4], [5, 6, 0]]) == 5 + 6
    assert busiest([[0, 1, 8], [3, 0, 9], [1, 2, 0]]) == 8 + 9


def test_the_row_holds_the_choice_against_the_best_and_bytes_against_predictions() -> None:
    found = row(RUNS, {"masked": "why"}, [[0.7, 0.1, 0.1, 0.1]], 2)
    assert (found["best"], found["slowdown_to_best"]) == ("autopar as dispatch", pytest.approx(1.2))
    assert found["significantly_slower"]
    assert found["bytes_errors"] == {"autopar as dispatch": pytest.approx(0.2), "autopar": 0.0}
    assert found["busiest_errors"] == {"autopar as dispatch": pytest.approx(0.4), "autopar": 0.0}
    assert found["wrong_losses"] == ["wrong"]
    assert found["by_hand_seconds"] == {"by hand": 1.1}
    assert found["loads"]["assumed"] == "uniform"
    assert found["loads"]["busiest_rank_over_mean"] == pytest.approx(1.6)


def test_what_was_chosen_blind_may_be_another_plan_that_ran() -> None:
    twins = {BLIND: f"{SAME_AS}'autopar as masked'", "autopar as masked": f"{SAME_AS}'autopar as dispatch'"}
    assert row(RUNS, twins, [[1.0]], 1)["blind_seconds"] == 1.0
    assert row(RUNS, {}, [[1.0]], 1)["blind_seconds"] is None
    assert summary([{"name": "few", **row(RUNS, twins, [[1.0]], 1)}])["worst_blind_to_chosen"] == pytest.approx(1 / 1.2)


def test_no_row_without_our_choice() -> None:
    with pytest.raises(AutoparError, match="did not fit"):
        row([each for each in RUNS if each["name"] != "autopar"], {"autopar": "it did not fit"}, [[1.0]], 1)


def test_the_busiest_rank_holds_a_block_of_the_experts() -> None:
    assert busiest_rank([[0.25] * 4, [0.5, 0.3, 0.1, 0.1]], 2) == pytest.approx(1.6)


def test_nothing_predicted_is_no_error() -> None:
    silent = run("alone", 1.0, [[0, 0], [0, 0]])
    silent["predicted"]["link_bytes"] = [[0, 0], [0, 0]]
    assert busiest_error(silent) is None


def test_the_summary_counts_what_reaches_its_goal() -> None:
    found = summary([{"name": "few", **row(RUNS, {}, [[1.0]], 1)}])
    assert (found["settings"], found["choice_within_1.05"]) == (1, 0)
    assert found["bytes_within_1_percent"] == "1 of 2"
    assert found["busiest_link_within_5_percent"] == "1 of 2"
    assert found["worst_busiest_link_error"] == pytest.approx(0.4)
    assert found["wrong_losses"] == {"few": ["wrong"]}
