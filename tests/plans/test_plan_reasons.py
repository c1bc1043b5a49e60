"""Why a plan was taken, in sentences."""

from __future__ import annotations

from dataclasses import replace

from autopar.plans.plan_reasons import idle_seconds, next_best, question_in_words, reasons, what_binds
from autopar.plans.plan_value import Baseline, PipelinePlan, Prediction, StagePlan
from tests.plans.test_plan_text import small_plan

GIB = 1024.0**3
OWN = Prediction(step_seconds=0.010, peak_bytes=3 * GIB, compute_seconds=0.009, exposed_communication_seconds=0.001)
SLOW = Prediction(step_seconds=0.016, peak_bytes=2 * GIB, compute_seconds=0.0091, exposed_communication_seconds=0.0069)
ASKED = {
    "inputs": {"ids": [[64, 4096], "torch.int64"]}, "precision": "bf16", "optimizer": "adamw",
    "memory_limit_bytes": 4 * GIB,
}  # fmt: skip
PLAN = replace(
    small_plan(),
    predicted=OWN,
    question=ASKED,
    baselines=(
        Baseline(name="ZeRO-3", dims={}, predicted=SLOW),
        Baseline(name="HSDP", dims={}, predicted=replace(SLOW, step_seconds=0.02)),
        Baseline(name="Megatron", dims={}, error="7 heads do not divide by 8"),
    ),
)


def test_what_was_asked_is_one_line() -> None:
    assert question_in_words(PLAN) == "64 x 4,096 tokens a step in bf16 with adamw, on 1x8 H100-SXM"
    images = {"inputs": {"images": [[64, 3, 8, 8], "torch.float32"]}}
    assert question_in_words(replace(PLAN, question=images)).startswith("64 x 3 x 8 x 8 values a step")
    assert question_in_words(replace(PLAN, question={})) == "on 1x8 H100-SXM"


def test_the_largest_part_of_the_step_binds() -> None:
    told = "computation binds: 9 ms of the step; communication that nothing hides takes 1 ms; memory is 75 % full"
    assert what_binds(PLAN) == told
    waits = replace(OWN, compute_seconds=0.002, exposed_communication_seconds=0.008, peak_bytes=3.9 * GIB)
    assert what_binds(replace(PLAN, predicted=waits)).startswith("communication and memory bind: 8 ms")
    tiny = replace(PLAN, predicted=replace(OWN, peak_bytes=1024.0))
    assert what_binds(tiny).endswith("less than 1 % of the memory is full")
    assert what_binds(replace(PLAN, predicted=Prediction(step_seconds=0.01, peak_bytes=1.0))) == ""


def test_the_next_best_plan_is_told_with_the_cause() -> None:
    assert next_best(PLAN) == (
        "next best is ZeRO-3, 6 ms slower: it waits 6.9 ms for communication that nothing hides (here 1 ms), with "
        "2.0 GiB per device (here 3.0 GiB)"
    )
    equal = replace(PLAN, baselines=(Baseline(name="DDP", dims={}, predicted=OWN), *PLAN.baselines))
    assert next_best(equal).startswith("the same step as DDP; next best is ZeRO-3")
    assert reasons(PLAN)[-1] == "does not run here: Megatron"
    assert next_best(replace(PLAN, baselines=())) == ""


def test_a_pipeline_names_its_bubbles_and_the_next_schedule() -> None:
    stages = tuple(StagePlan(name=f"stage {n}", last_operator=None, rank_group=n) for n in range(2))
    other = (Baseline(name="schedule zb-h1", dims={}, objective_seconds=0.0150),)
    staged = replace(
        PLAN, pipeline=PipelinePlan(schedule="1f1b", chunks=1, stages=stages), baselines=(), alternatives=other,
        objective_seconds=0.010, predicted=replace(OWN, compute_seconds=0.004),
    )  # fmt: skip
    assert what_binds(staged).startswith("waiting for other stages binds: 5 ms of the step; passes with their")
    assert next_best(staged) == "next best is schedule zb-h1, 5 ms slower"
    assert idle_seconds(staged.predicted) == OWN.step_seconds - 0.004 - 0.001
