"""A plan is kept for another size where its lowering is the same but for numbers and fits; else it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.capture import Captures
from autopar.demo.gpt import GPT, GPTConfig
from autopar.errors import PlanMismatchError
from autopar.hardware.cluster import Cluster
from autopar.kept_plans import KeptPlan, KeptPlans
from autopar.passes.lowering.chain import lowered_step, step_to_run
from autopar.passes.lowering.stage import LoweredStep
from autopar.planner.memory.resident_states import peak_bytes
from autopar.planner.problem.optimizer_states import state_bytes
from autopar.plans.parallel_plan import Plan
from autopar.program import Program
from autopar.questions import CapturedModel, capture_model, plan_program
from autopar.request import Request

MODEL = GPT(GPTConfig(vocabulary=16, positions=32, width=16, heads=2, layers=1))
REQUEST = Request(cluster=Cluster.parse("2 cpu"), optimizer=torch.optim.SGD, with_baselines=False, mode="fast")
CAPTURES = Captures()


def captured(batch: int, length: int, *, training: bool = True) -> CapturedModel:
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return capture_model(MODEL, (tokens, tokens), {}, REQUEST, CAPTURES, training=training)


def program(batch: int, length: int) -> Program:
    return captured(batch, length).program


@pytest.fixture(scope="module")
def split_batch() -> Plan:
    whole = captured(8, 8)
    return plan_program(whole.program, replace(REQUEST, dims={"dp_replicate": 2}), whole)


def kept(plan: Plan) -> tuple[KeptPlans, LoweredStep]:
    plans, first = KeptPlans(), program(8, 8)
    lowered = step_to_run(first, plan, 0)
    plans.keep(first, lowered)
    return plans, lowered


def nearest(plans: KeptPlans, other: Program) -> KeptPlan:
    found = plans.nearest(other)
    assert found is not None
    return found


@pytest.mark.parametrize(("batch", "length"), [(8, 12), (8, 7), (8, 15), (4, 8), (2, 3)])
def test_a_plan_that_splits_the_batch_is_kept(split_batch: Plan, batch: int, length: int) -> None:
    plans, _ = kept(split_batch)
    other = program(batch, length)
    found = nearest(plans, other)
    lowered = step_to_run(other, found.plan, 1)
    found.check(lowered, REQUEST)
    shapes = {entry.shape for entry in lowered.only.program.inputs if entry.role == "input"}
    assert shapes == {(batch // 2, length)}


def test_other_copies_of_blocks_are_no_choice_of_this_plan(split_batch: Plan) -> None:
    plans, _ = kept(split_batch)
    other = program(7, 8)
    with pytest.raises(PlanMismatchError, match="other collectives"):
        nearest(plans, other).check(lowered_step(other, split_batch, 0), REQUEST)


def test_a_layout_that_cannot_be_is_refused(split_batch: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="cannot lie as"):
        step_to_run(program(1, 8), split_batch, 0)


def test_a_step_that_holds_more_than_the_limit_is_refused(split_batch: Plan) -> None:
    plans, _ = kept(split_batch)
    other = program(8, 15)
    lowered = step_to_run(other, split_batch, 0)
    needed = peak_bytes(lowered, state_bytes(other, torch.optim.SGD), REQUEST.cluster.device)
    nearest(plans, other).check(lowered, replace(REQUEST, memory_limit=f"{needed:.0f}B"))
    with pytest.raises(PlanMismatchError, match="MiB, the limit is"):
        nearest(plans, other).check(lowered, replace(REQUEST, memory_limit=f"{needed - 1024:.0f}B"))


def test_the_peak_is_the_one_that_the_planner_predicts(split_batch: Plan) -> None:
    lowered = kept(split_batch)[1]
    peak = peak_bytes(lowered, state_bytes(program(8, 8), torch.optim.SGD), REQUEST.cluster.device)
    assert peak == pytest.approx(split_batch.predicted.peak_bytes, rel=1e-9)


def test_a_graph_of_more_than_twice_the_elements_or_of_other_names_is_planned(split_batch: Plan) -> None:
    plans, _ = kept(split_batch)
    assert plans.nearest(program(8, 17)) is None
    assert plans.nearest(captured(8, 8, training=False).program) is None


def test_of_several_plans_the_one_of_sizes_that_divide_alike_is_tried(split_batch: Plan) -> None:
    plans, lowered = kept(split_batch)
    plans.keep(program(7, 8), lowered)
    assert nearest(plans, program(6, 8)).shapes[0] == (8, 8)
    assert nearest(plans, program(5, 8)).shapes[0] == (7, 8)
