"""Where two plans part, in few lines."""

from __future__ import annotations

from dataclasses import replace

from autopar.layouts.placement import Mesh
from autopar.report.differences import changed_lines
from tests.plans.test_plan_text import S0, R, small_plan

NAMES = ("before", "after")


def test_equal_plans_have_no_lines() -> None:
    assert changed_lines(small_plan(), small_plan(), NAMES) == []


def test_layers_that_change_alike_are_one_line() -> None:
    plan = small_plan()
    whole = {name: replace(entry, stored=(R, R)) for name, entry in plan.parameters.items() if name != "head"}
    lines = changed_lines(plan, plan.with_(parameters={**plan.parameters, **whole}), NAMES)
    assert len(lines) == 3, lines
    assert lines[2].split("  ")[0] == "layers.*.up"
    assert lines[2].endswith("  R")
    assert "dp_shard: S(0) -> R" in lines[2]


def test_one_layer_that_changes_is_counted() -> None:
    plan = small_plan()
    one = {**plan.parameters, "layers.1.up": replace(plan.parameters["layers.1.up"], stored=(R, R))}
    assert changed_lines(plan, plan.with_(parameters=one), NAMES)[2].endswith("; 1 x R")


def test_operators_are_counted_and_the_step_is_named() -> None:
    plan = small_plan()
    operator = replace(plan.operators["layers.0.up/mm#0"], outputs=((R, S0),), recompute=True)
    lines = changed_lines(plan, plan.with_(operators={"layers.0.up/mm#0": operator}, micro_batches=2), NAMES)
    assert lines == [
        "1 of 1 operators are split otherwise",
        "1 of 1 operators are computed again in backward otherwise",
        "micro-batches: before 1, after 2",
    ]


def test_the_same_placements_on_axes_of_other_names_differ() -> None:
    plan = small_plan()
    renamed = plan.with_(mesh=Mesh(("outer", "inner"), (2, 4)))
    assert "1 of 1 operators are split otherwise" in changed_lines(plan, renamed, NAMES)
