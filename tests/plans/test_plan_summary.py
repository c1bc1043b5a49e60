"""The page of a whole plan."""

from __future__ import annotations

import html
from dataclasses import replace

from autopar.layouts.placement import Mesh, Replicate, Shard
from autopar.plans.plan_summary import (
    beside_known_plans,
    facts,
    gap_meaning,
    headline,
    legend,
    parameter_rows,
    plan_columns,
    plan_rows,
)
from autopar.plans.plan_value import OUT_OF_TIME, Prediction
from tests.plans.test_plan_text import small_plan

INPUTS = {"mask": [[16, 128, 128], "torch.bool"], "input_ids": [[16, 128], "torch.int64"]}
TOKENS = {"inputs": INPUTS, "precision": "bf16", "memory_limit_bytes": 4 * 1024**3}


def test_equal_layers_are_one_row() -> None:
    assert parameter_rows(small_plan()) == [
        ("layers.*.up", "2", "dp_shard: S(0) -> R (gathered again in backward)"),
        ("head", "1", "tp: S(0)"),
    ]


def test_zigzag_order_has_a_line_where_a_plan_has_it() -> None:
    plan = small_plan()
    assert "zigzag" not in legend(plan)
    name, product = next(iter(plan.operators.items()))
    turned = replace(product, inputs=((Replicate(), Shard(1, 2, True)), *product.inputs[1:]))
    line = legend(replace(plan, operators={name: turned})).splitlines()[-1]
    assert line.startswith("tp: the sequence is in zigzag order: rank 0 has the first and the last block")


def test_rows_put_the_chosen_plan_beside_priced_and_impossible_baselines() -> None:
    chosen, zero, megatron = plan_rows(small_plan())
    assert chosen == ("chosen", "dp_shard=2 tp=4", "12.8 ms", "-", "-", "3.0 GiB", "12 ms")
    assert zero[:3] == ("ZeRO-3", "dp_shard=8", "20 ms")
    assert megatron[2] == "does not run"


def test_summary_names_cluster_and_baselines() -> None:
    text = small_plan().summary()
    assert "1x8 H100-SXM" in text
    assert "ZeRO-3" in text
    assert "layers.*.up" in text
    assert "Megatron does not run: 7 heads do not divide by 8" in text


def test_the_first_line_says_what_it_is_how_fast_and_how_full() -> None:
    plan = replace(small_plan(), question=TOKENS, statistics={"flops_of_pass": 5e12})
    assert headline(plan) == (
        "ZeRO-3 2 x TP 4 over 8 devices: 12.8 ms a step, 20,000 tokens/s per GPU, 6.1 % of peak, 3.0 of 4.0 GiB"
    )
    assert "128 samples/s" not in headline(replace(plan, question={}))
    images = {"inputs": {"images": [[64, 3, 8, 8], "torch.float32"], "labels": [[64], "torch.int64"]}}
    assert "625 samples/s per GPU" in headline(replace(plan, question=images))


def test_the_second_line_compares_with_the_best_known_plan_that_runs() -> None:
    plan = small_plan()
    assert beside_known_plans(plan) == "56 % faster than ZeRO-3, the best of 2 known plans; proven optimal on this mesh"
    faster = replace(plan, predicted=Prediction(step_seconds=0.005, peak_bytes=1.0))
    assert beside_known_plans(faster).startswith("4.0 times as fast as ZeRO-3")
    slower = replace(plan, predicted=Prediction(step_seconds=0.025, peak_bytes=1.0), gap=0.02)
    assert beside_known_plans(slower).startswith("20 % slower than ZeRO-3")
    assert beside_known_plans(slower).endswith("; at most 2.00% from the optimum on this mesh")
    equal = replace(plan, predicted=Prediction(step_seconds=0.02, peak_bytes=1.0))
    assert beside_known_plans(equal).startswith("as fast as ZeRO-3")
    assert beside_known_plans(replace(plan, baselines=plan.baselines[1:])).startswith("none of 1 known plans runs")
    assert beside_known_plans(replace(plan, baselines=())) == "proven optimal on this mesh"


def test_known_plans_that_were_not_priced_in_time_are_not_said_to_fail() -> None:
    plan = small_plan()
    late = replace(plan.baselines[1], error=OUT_OF_TIME)
    some = replace(plan, baselines=(plan.baselines[0], late))
    assert beside_known_plans(some) == (
        "56 % faster than ZeRO-3, the best of 1 known plans; 1 more were not priced, the time was over; "
        "proven optimal on this mesh"
    )
    none = beside_known_plans(replace(plan, baselines=(late,)))
    assert none == "none of 1 known plans was priced, the time was over; proven optimal on this mesh"
    assert [row[2] for row in plan_rows(some)][1:] == ["20 ms", "not priced"]


def test_the_gap_over_all_meshes_is_named_where_it_is_larger() -> None:
    plan = replace(small_plan(), statistics={"gap_over_all_meshes": 0.053})
    assert gap_meaning(plan) == "proven optimal on this mesh, at most 5.3% from it over all meshes"


def test_a_table_of_plans_has_what_a_second_brings() -> None:
    plan = replace(small_plan(), question=TOKENS, statistics={"flops_of_pass": 5e12})
    assert plan_columns(plan)[3] == "tokens/s"
    assert plan_rows(plan)[0][2:5] == ("12.8 ms", "160,000", "6.1 %")
    assert plan_rows(plan)[1][2:5] == ("20 ms", "102,000", "3.9 %")
    assert plan_rows(plan)[2][2:] == ("does not run", "", "", "", "-")
    assert {len(row) for row in plan_rows(plan)} == {len(plan_columns(plan))}


def test_what_the_search_counted_is_shown_on_request() -> None:
    plan = replace(small_plan(), statistics={"strategies": 93})
    assert "strategies: 93" in plan.summary(verbose=True)
    assert "strategies" not in plan.summary()
    assert "no plan on this mesh costs less than 12 ms (gap 0)" in facts(plan)[1]


def test_the_legend_explains_placements_and_free_axes() -> None:
    assert legend(small_plan()).splitlines()[1:] == []
    assert "stored as the first" in legend(small_plan())
    free = replace(small_plan(), mesh=Mesh(("outer", "inner"), (2, 4)))
    assert "outer, inner: axes of the mesh that the search was free to use" in legend(free)
    assert "ranks beside each other lie along inner" in legend(free)


def test_a_plan_prints_itself_on_one_screen() -> None:
    lines = repr(small_plan()).splitlines()
    assert lines[0].startswith("Plan: ZeRO-3 2 x TP 4 over 8 devices: 12.8 ms a step")
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    many = {f"block_{chr(97 + n)}": parameter for n in range(26) for parameter in (small_plan().parameters["head"],)}
    shown = repr(replace(small_plan(), parameters=many))
    assert "... and 18 more groups; plan.summary() says more" in shown
    assert len(shown.splitlines()) <= 24


def test_a_notebook_shows_the_first_screen_of_the_report_in_a_frame() -> None:
    cell = small_plan()._repr_html_()
    assert cell.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    page = html.unescape(cell)
    assert "ZeRO-3 2 x TP 4 over 8 devices" in page
    assert "Against known plans" in page
    assert "<script" not in page
