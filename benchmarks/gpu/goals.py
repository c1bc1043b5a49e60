"""What the figures are held against, as data. A goal that is missed is written down; nothing fails for it.

    verdicts("kernels", [{"case": "rms_norm ...", "memory_share": 0.93}])
    -> [{"goal": "bandwidth", "case": "rms_norm ...", "value": 0.93, "at_least": 0.9, "met": True}]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """figure: of a row; stages, cases: beginnings of the names that it holds for (none: all)."""

    name: str
    what: str
    figure: str
    at_least: float | None = None
    at_most: float | None = None
    stages: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()


GOALS: tuple[Goal, ...] = (
    Goal(name="peak", what="the predicted peak is within 2 % of the measured", figure="peak_error", at_most=0.02),
    Goal(name="step", what="the predicted step is within 10 % of the measured", figure="step_error", at_most=0.10),
    Goal(
        name="torch.compile",
        what="on one device a step is no slower than that of torch.compile",
        figure="speed_of_compile",
        at_least=1.0,
        stages=("steps-gpt2", "steps-llama-1b"),
    ),
    Goal(
        name="bandwidth",
        what="norms, losses, rotary embeddings and joined attention reach 90 % of the memory rate of a copy",
        figure="memory_share",
        at_least=0.9,
        cases=(
            "rms_norm",
            "add_rms_norm",
            "add_layer_norm",
            "layer_norm",
            "cross_entropy",
            "rope",
            "merge_blocks",
        ),
    ),
    Goal(
        name="products",
        what="a loss in chunks reaches 70 % of the rate of its product at once",
        figure="product_share",
        at_least=0.7,
        cases=("linear_cross_entropy",),
    ),
    Goal(
        name="runs of rows",
        what="products by runs of rows reach half of the rate of one product",
        figure="product_share",
        at_least=0.5,
        cases=("grouped",),
    ),
    Goal(
        name="attention",
        what="attention reaches 70 % of the best of torch's kernels",
        figure="speed_of_best",
        at_least=0.7,
    ),
)


def verdicts(stage: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One per goal and row that has its figure."""
    return [
        {
            "goal": goal.name,
            "case": row["case"],
            "value": row[goal.figure],
            **_bound(goal),
            "met": _is_met(goal, row[goal.figure]),
        }
        for row in rows
        for goal in GOALS
        if goal.figure in row and stage.startswith(goal.stages or "") and row["case"].startswith(goal.cases or "")
    ]


def _bound(goal: Goal) -> dict[str, float]:
    bounds = {"at_least": goal.at_least, "at_most": goal.at_most}
    return {name: value for name, value in bounds.items() if value is not None}


def _is_met(goal: Goal, value: float) -> bool:
    return (goal.at_least is None or value >= goal.at_least) and (goal.at_most is None or value <= goal.at_most)
