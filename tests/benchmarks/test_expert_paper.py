"""Experts on paper: what decides in closed form, and the free choice as the shortest of the ways."""

from __future__ import annotations

from typing import Any

from benchmarks.expert_paper import MIXTURES, closed_form, shortest


def row(way: str, seconds: float) -> dict[str, Any]:
    return {
        "way": way, "runs_as": way, "step_seconds": seconds, "exposed_communication_seconds": 0.1,
        "peak_bytes": len(way),
    }  # fmt: skip


def test_the_free_choice_is_the_shortest_that_has_a_plan() -> None:
    refused = {"way": "dispatch", "error": "InfeasibleError: no"}
    found = shortest([refused, row("gather", 2.0), row("masked", 3.0)])
    assert (found["way"], found["runs_as"], found["step_seconds"], found["peak_bytes"]) == ("free", "gather", 2.0, 6)
    assert "error" in shortest([refused])


def test_bytes_of_rows_grow_with_tokens_and_those_of_weights_with_experts() -> None:
    mixtral = MIXTURES["mixtral-8x22b"]
    one, two = (closed_form(mixtral, 8, tokens) for tokens in (4096, 8192))
    assert one["dispatch"] == 2 * 2 * 4096 * 6144 * 2 * 7 // 8
    assert (two["dispatch"], two["masked"]) == (2 * one["dispatch"], 2 * one["masked"])
    assert two["gather"] == one["gather"] == 3 * 8 * 6144 * 16384 * 2 * 7 // 8
    assert one["masked"] == 8 * one["dispatch"]
