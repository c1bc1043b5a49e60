"""Unequal rank groups of a plan: read back, seen from one group, refused where they do not tile the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Mesh, Replicate, Shard
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import check_pipeline
from autopar.plans.plan_value import OperatorPlan, ParameterPlan, PipelinePlan, Prediction, RankGroup, StagePlan

SPLIT = (Shard(0),)
WEIGHT = ParameterPlan(stored=SPLIT, used=SPLIT, gradient=SPLIT)
WHOLE = replace(WEIGHT, stored=(Replicate(),), used=(Replicate(),), gradient=(Replicate(),))
SMALL, LARGE = RankGroup(first_rank=2, shape=(1,), parameters={"w": WHOLE}), RankGroup(first_rank=0, shape=(2,))


def _plan(*groups: RankGroup, shape: tuple[int, ...] = (2, 2)) -> Plan:
    stages = tuple(
        StagePlan(name=name, last_operator=end, rank_group=group)
        for group, (name, end) in enumerate((("first", "a/mm#0"), ("last", None)))
    )
    operator = OperatorPlan(axes=("m",), inputs=(SPLIT,), outputs=(SPLIT,))
    return Plan(
        mesh=Mesh(("pp", "tp"), shape),
        parameters={"w": WEIGHT},
        operators={"a/mm#0": operator, "b/mm#0": operator},
        inputs={"x": SPLIT},
        buffers={},
        outputs={},
        predicted=Prediction(step_seconds=1.0, peak_bytes=1.0),
        objective_seconds=1.0,
        bound_seconds=1.0,
        gap=0.0,
        fingerprint="",
        cluster="3 cpu",
        profile="",
        micro_batches=4,
        pipeline=PipelinePlan(schedule="1f1b", chunks=1, stages=stages, groups=groups),
    )


def test_a_plan_with_unequal_groups_reads_back() -> None:
    plan = _plan(SMALL, LARGE)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.num_ranks == 3


def test_a_group_sees_its_own_mesh_and_layouts() -> None:
    plan = _plan(SMALL, LARGE)
    assert plan.on_group(0).mesh == Mesh(("tp",), (1,))
    assert plan.on_group(0).parameters["w"] == WHOLE
    assert plan.on_group(1).mesh == Mesh(("tp",), (2,))
    assert plan.on_group(1).parameters["w"] == WEIGHT
    assert plan.on_group(1).pipeline is None


def test_equal_groups_follow_from_the_mesh() -> None:
    plan = _plan(shape=(2, 3))
    assert plan.rank_groups == (RankGroup(first_rank=0, shape=(3,)), RankGroup(first_rank=3, shape=(3,)))
    assert plan.num_ranks == 6


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ((LARGE, replace(SMALL, first_rank=3)), r"begin at \[0, 3\] with \[2, 1\] ranks"),
        ((LARGE, replace(SMALL, first_rank=1)), r"begin at \[0, 1\]"),
        ((SMALL, replace(SMALL, first_rank=0)), r"shapes \[\[1\], \[1\]\] on a mesh of \[2, 2\]"),
        ((LARGE,), "one group per coordinate"),
        ((LARGE, replace(SMALL, shape=(1, 1))), "one size per other axis"),
    ],
)
def test_groups_that_do_not_tile_the_ranks_are_refused(groups: tuple[RankGroup, ...], words: str) -> None:
    plan = _plan(*groups)
    assert plan.pipeline is not None
    with pytest.raises(ConfigurationError, match=words):
        check_pipeline(plan, plan.pipeline)
