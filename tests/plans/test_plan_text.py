"""Plans in words."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Mesh, Partial, Replicate, Shard
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import axes_in_words, format_bytes, format_count, format_seconds, matching_names
from autopar.plans.plan_value import Baseline, OperatorPlan, ParameterPlan, PipelinePlan, Prediction

R, S0, P = Replicate(), Shard(0), Partial("sum")


def small_plan() -> Plan:
    """Two equal layers, ZeRO-3 over dp_shard and one weight split over tp."""
    zero = ParameterPlan(stored=(S0, R), used=(R, R), gradient=(P, R))
    megatron = ParameterPlan(stored=(R, S0), used=(R, S0), gradient=(P, S0))
    operator = OperatorPlan(
        axes=("batch", None), inputs=((S0, R), (R, R)), outputs=((S0, R),), shared_forward=((R, R),)
    )
    return Plan(
        mesh=Mesh(("dp_shard", "tp"), (2, 4)),
        parameters={"layers.0.up": zero, "layers.1.up": zero, "head": megatron},
        operators={"layers.0.up/mm#0": operator},
        inputs={"tokens": (S0, R)},
        buffers={},
        outputs={},
        predicted=Prediction(step_seconds=0.0128, peak_bytes=3 * 1024**3),
        objective_seconds=0.012,
        bound_seconds=0.012,
        gap=0.0,
        fingerprint="",
        cluster="1x8 H100-SXM",
        profile="preset",
        baselines=(
            Baseline(
                name="ZeRO-3",
                dims={"dp_shard": 8},
                objective_seconds=0.02,
                predicted=Prediction(step_seconds=0.02, peak_bytes=1.0),
            ),
            Baseline(name="Megatron", dims={"tp": 8}, error="7 heads do not divide by 8"),
        ),
        explanations={"head": (("stored R", 3.1e-5),)},
    )


def test_units() -> None:
    assert format_seconds(0.0128) == "12.8 ms"
    assert format_seconds(3.1e-5) == "31 us"
    assert format_seconds(0.0) == "0 s"
    assert format_bytes(3 * 1024**3) == "3.0 GiB"
    assert format_bytes(None) == "-"
    counts = [format_count(count) for count in (0.521, 7.0, 83.26, 8312.0, 99_960.0)]
    assert counts == ["0.521", "7", "83.3", "8,310", "100,000"]


def test_explain_names_collectives_and_the_runner_up() -> None:
    text = str(small_plan().explain("head"))
    assert "instead stored R  +31 us" in text
    assert "reduce" in str(small_plan().explain("layers.0.up"))
    assert "all_gather(dp_shard)" in str(small_plan().explain("layers.0.up/mm#0"))


def test_where_the_way_depends_on_sizes_that_a_plan_does_not_have_both_are_named() -> None:
    plan = small_plan()
    operator = replace(plan.operators["layers.0.up/mm#0"], shared_forward=((R, S0),))
    text = str(replace(plan, operators={"layers.0.up/mm#0": operator}).explain("layers.0.up/mm#0"))
    straight, waiting = "all_gather(dp_shard), slice(tp)", "slice(tp), all_gather(dp_shard), all_to_all(tp)"
    assert f"tp: S(0)  by {straight}; by {waiting} where another dim of a large tensor has room" in text


def test_explain_takes_a_module_and_lists_what_it_holds() -> None:
    assert matching_names(small_plan(), "layers.0") == ["layers.0.up", "layers.0.up/mm#0"]


def test_unknown_name_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(ConfigurationError, match="nearest: head"):
        small_plan().explain("heads")


def test_a_plan_alone_says_why_it_names_no_other_choice() -> None:
    plan = small_plan()
    held = {**plan.explanations, "head": ()}
    assert "neighbours would have to follow" in str(replace(plan, explanations=held).explain("head"))
    assert "so no search wrote it" in str(replace(plan, explanations={}).explain("head"))
    only = {name: others for name, others in held.items() if name != "head"} or {"other": ()}
    assert "there is no other choice" in str(replace(plan, explanations=only).explain("head"))


def test_a_pipeline_is_explained_by_what_was_compared() -> None:
    stages = PipelinePlan(schedule="1f1b", chunks=1, stages=())
    others = (
        Baseline(name="without stages", dims={}, objective_seconds=0.02),
        Baseline(name="pipeline pp=4 x 2", dims={}, bound_seconds=0.03),
        Baseline(name="schedule zb-h2", dims={}, error="does not fit"),
    )
    plan = replace(small_plan(), pipeline=stages, explanations={}, mesh=Mesh(("pp", "dp_shard", "tp"), (2, 2, 4)))
    text = str(replace(plan, alternatives=others).explain("head"))
    assert "as a whole 12 ms per step" in text
    assert "instead without stages: 20 ms per step" in text
    assert "instead pipeline pp=4 x 2: at least 30 ms per step" in text
    assert "instead schedule zb-h2: does not fit" in text
    assert "no runner-up" not in text
    assert "no runner-up" in str(plan.explain("head"))
    assert "and 1 more in plan.alternatives" in str(replace(plan, alternatives=(*others, *others[:2])).explain("head"))


def test_what_an_axis_splits_is_said_with_the_dim_where_there_is_one() -> None:
    mesh = Mesh(("dp_shard", "tp"), (2, 4))
    assert axes_in_words(("m", "k"), [(S0, P)], mesh) == "dp_shard splits m (dim 0); tp splits k (partial sums)"
    assert axes_in_words(("d0", "h"), [(S0, R)], mesh) == "dp_shard splits dim 0; tp splits h"
    assert axes_in_words((None, "s"), [(R, Shard(2, 2, True))], mesh) == "tp splits s (dim 2, zigzag)"
    assert axes_in_words((None, "partial"), [(R, P)], mesh) == "tp passes partial sums on"
    assert axes_in_words((None, None), [(R, R)], mesh) == "whole on every device"


CHOICES: list[tuple[str, dict[str, object]]] = [
    ("parameters", {"stored": (R, R)}),
    ("parameters", {"used": (S0, R)}),
    ("parameters", {"gradient": (R, R)}),
    ("parameters", {"keep_gathered": True}),
    ("parameters", {"shared_forward": (R, S0)}),
    ("parameters", {"shared_backward": (R, S0)}),
    ("parameters", {"stored_on": "host"}),
    ("operators", {"axes": (None, None)}),
    ("operators", {"inputs": ((R, R), (R, R))}),
    ("operators", {"outputs": ((R, R),)}),
    ("operators", {"shared_forward": ()}),
    ("operators", {"shared_backward": ((R, R),)}),
    ("operators", {"recompute": True}),
    ("operators", {"recompute_at": ("layers.0.up/mm#1",)}),
    ("operators", {"saved_on": "host"}),
    ("operators", {"saved_as": "4bit"}),
    ("operators", {"implementation": "ring"}),
]


@pytest.mark.parametrize(("kind", "change"), CHOICES)
def test_a_diff_shows_every_choice(kind: str, change: dict[str, object]) -> None:
    plan = small_plan()
    entries = getattr(plan, kind)
    name = next(iter(entries))
    other = replace(plan, **{kind: {**entries, name: replace(entries[name], **change)}})  # type: ignore[arg-type]
    assert plan.diff(other).count(f"+{name}: ") == 1
    fields = {field.name for field in dataclasses.fields(entries[name])}
    assert fields == {field for row, asked in CHOICES if row == kind for field in asked}


def test_equal_plans_differ_in_nothing() -> None:
    assert small_plan().diff(small_plan()) == ""
