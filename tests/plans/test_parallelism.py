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


def test_an_axis_that_splits_experts_is_called_so_whatever_else_splits_the_batch_over_it() -> None:
    plan = on_one_axis("m", S0)
    dense = plan.operators["up/mm#0"]

    def mixed(axis: str, *splits: str) -> str:
        experts = {f"mlp/expert_linear#{n}": replace(dense, axes=(split,)) for n, split in enumerate(splits)}
        others = {f"layers.{n}/mm#0": dense for n in range(9)}
        return parallelism(replace(plan, mesh=Mesh((axis,), (4,)), operators={**others, **experts}))

    assert mixed("inner", "t+e", "t+e") == mixed("ep", "e", "e") == "expert parallelism over 4 devices"
    assert mixed("inner", "t+e", "t+e", "t") == "expert parallelism over 4 devices"
    assert mixed("ep", "t+e", "t") == mixed("ep", "t") == mixed("ep") == "ZeRO-3 over 4 devices"


def test_products_of_kinds_name_their_degrees() -> None:
    assert parallelism(small_plan()) == "ZeRO-3 2 x TP 4 over 8 devices"
    hybrid = replace(small_plan(), mesh=Mesh(("dp_replicate", "dp_shard"), (2, 4)))
    assert parallelism(hybrid).startswith("HSDP (ZeRO-")
    assert parallelism(replace(small_plan(), mesh=Mesh(("dp_shard", "tp"), (1, 1)))) == "one device"


def attending(*ways: tuple[str, str | None], axes: tuple[str, ...] = ("dp_replicate", "cp")) -> Plan:
    """Attentions on axes of 2 and 4: (implementation, what the last axis splits); an outer `cp` splits the sequence."""
    outer = "s" if axes[0] == "cp" else "b"
    attentions = {
        f"layers.{n}/attention#0": OperatorPlan(
            axes=(outer, split), implementation=way, inputs=((R, R),) * 3, outputs=((R, R),)
        )
        for n, (way, split) in enumerate(ways)
    }
    whole = ParameterPlan(stored=(R, R), used=(R, R), gradient=(R, R))
    return replace(small_plan(), mesh=Mesh(axes, (2, 4)), parameters={"up": whole}, operators=attentions)


def test_context_parallelism_is_named_by_how_attention_runs() -> None:
    ring, heads, gathered = ("ring", "s"), ("default", "h"), ("default", "s")
    assert parallelism(attending(ring)) == "DDP 2 x ring attention 4 over 8 devices"
    assert parallelism(attending(heads, ("default", "g"))) == "DDP 2 x Ulysses 4 over 8 devices"
    words = "DDP 2 x context parallelism 4 (keys and values gathered) over 8 devices"
    assert parallelism(attending(gathered)) == words
    mixed = parallelism(attending(ring, ring, heads, ("default", None)))
    assert "context parallelism 4 (ring attention in 2, Ulysses in 1, attention whole in 1 of 4)" in mixed
    two = ("cp", "cp_inner")
    assert parallelism(attending(heads, axes=two)).startswith("context parallelism 2 (keys and values gathered) x Uly")
    assert parallelism(attending(("ring", "h"), axes=two)) == "ring attention 2 x Ulysses 4 over 8 devices"
    assert parallelism(attending(ring, axes=two)) == "ring attention over 8 devices"
    stages = tuple(StagePlan(name=f"stage {n}", last_operator=None, rank_group=n) for n in range(2))
    pipeline = PipelinePlan(schedule="zb-h1", chunks=1, stages=stages)
    staged = replace(attending(ring, axes=two), pipeline=pipeline, mesh=Mesh(("pp", *two), (2, 2, 4)))
    assert parallelism(staged) == "2 stages (zb-h1) of ring attention 8 over 16 devices"
    product = replace(attending(heads).operators["layers.0/attention#0"], axes=("m", "m"))
    free = attending(heads, axes=("dp_replicate", "inner"))
    with_rows = replace(free, operators={**free.operators, "up/mm#0": product, "up/mm#1": product})
    assert parallelism(with_rows) == "DDP 2 x Ulysses 4 over 8 devices"


def test_stages_are_named_with_their_schedule() -> None:
    stages = tuple(StagePlan(name=f"stage {n}", last_operator=None, rank_group=n) for n in range(2))
    pipeline = PipelinePlan(schedule="zb-h1", chunks=1, stages=stages)
    plan = replace(small_plan(), pipeline=pipeline, mesh=Mesh(("pp", "dp_shard", "tp"), (2, 2, 4)))
    assert parallelism(plan) == "2 stages (zb-h1) of ZeRO-3 2 x TP 4 over 16 devices"
    groups = (RankGroup(first_rank=0, shape=(1, 1)), RankGroup(first_rank=1, shape=(1, 3)))
    unequal = replace(plan, pipeline=replace(pipeline, groups=groups))
    assert parallelism(unequal) == "2 stages (zb-h1) on groups of 1 + 3 devices"
