"""What a plan is, in the words of the field."""

from __future__ import annotations

from dataclasses import replace

from autopar.layouts.placement import Mesh, Replicate, Shard
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import parallelism
from autopar.plans.plan_value import OperatorPlan, ParameterPlan, PipelinePlan, RankGroup, StagePlan
from tests.plans.test_plan_text import small_plan

R, S0 = Replicate(), Shard(0)


def on_one_axis(split: str | None, stored: Replicate | Shard, kept: bool = False) -> Plan:
    """Four devices along one free axis: what a product splits over it, and how its weight is stored."""
    weight = ParameterPlan(stored=(stored,), used=(R,), gradient=(stored,), keep_gathered=kept)
    product = OperatorPlan(axes=(split,), inputs=((R,), (R,)), outputs=((R,),))
    mesh = Mesh(("inner",), (4,))
    return replace(small_plan(), mesh=mesh, parameters={"up": weight}, operators={"up/mm#0": product})


def test_one_axis_is_called_by_what_it_splits() -> None:
    assert parallelism(on_one_axis("m", R)) == "DDP over 4 devices"
    assert parallelism(on_one_axis("m", S0)) == "ZeRO-3 over 4 devices"
    assert parallelism(on_one_axis("m", S0, kept=True)) == "ZeRO-2 over 4 devices"
    assert parallelism(on_one_axis("n", S0)) == "TP over 4 devices"
    some = on_one_axis("m", R)
    norms = {f"norm{n}": some.parameters["up"] for n in range(2)}
    mixed = replace(some, parameters={**norms, "up": on_one_axis("m", S0).parameters["up"]})
    assert parallelism(mixed) == "DDP (ZeRO-3 for 1 of 3 parameters) over 4 devices"
    assert parallelism(on_one_axis(None, R)) == "the same work on each of 4 devices"


def test_products_of_kinds_name_their_degrees() -> None:
    assert parallelism(small_plan()) == "ZeRO-3 2 x TP 4 over 8 devices"
    hybrid = replace(small_plan(), mesh=Mesh(("dp_replicate", "dp_shard"), (2, 4)))
    assert parallelism(hybrid).startswith("HSDP (ZeRO-")
    assert parallelism(replace(small_plan(), mesh=Mesh(("dp_shard", "tp"), (1, 1)))) == "one device"


def test_stages_are_named_with_their_schedule() -> None:
    stages = tuple(StagePlan(name=f"stage {n}", last_operator=None, rank_group=n) for n in range(2))
    pipeline = PipelinePlan(schedule="zb-h1", chunks=1, stages=stages)
    plan = replace(small_plan(), pipeline=pipeline, mesh=Mesh(("pp", "dp_shard", "tp"), (2, 2, 4)))
    assert parallelism(plan) == "2 stages (zb-h1) of ZeRO-3 2 x TP 4 over 16 devices"
    groups = (RankGroup(first_rank=0, shape=(1, 1)), RankGroup(first_rank=1, shape=(1, 3)))
    unequal = replace(plan, pipeline=replace(pipeline, groups=groups))
    assert parallelism(unequal) == "2 stages (zb-h1) on groups of 1 + 3 devices"
