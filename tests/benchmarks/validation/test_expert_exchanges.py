"""Exchanges of expert parallelism: what crosses the nodes, and how often."""

from __future__ import annotations

from dataclasses import replace

from autopar.hardware.cluster import Cluster
from benchmarks.validation.experts import exchange_seconds
from benchmarks.validation.runs import Experts, ModelShape, ParallelShape, Stack, TrainingRun

RUN = TrainingRun(
    model=ModelShape(
        family="moe", hidden=2048, ffn=8192, layers=4, heads=16, kv_heads=16, vocab=2048, seq_len=4096,
        experts=Experts(count=64, per_token=8, hidden=1024),
    ),
    parallel=ParallelShape(dp=32, ep=32),
    stack=Stack(name="megatron"),
    cluster=Cluster.parse("4x8 H100-SXM"),
)  # fmt: skip


def test_forwarding_sends_less_between_nodes_and_as_much_inside() -> None:
    forwarded = replace(RUN, stack=replace(RUN.stack, forwards_tokens=True))
    assert exchange_seconds(forwarded, False) < 0.7 * exchange_seconds(RUN, False)
    inside = replace(RUN, parallel=ParallelShape(dp=32, ep=8))
    assert exchange_seconds(replace(inside, stack=forwarded.stack), False) == exchange_seconds(inside, False)


def test_groups_of_experts_on_whole_nodes_bound_the_nodes_of_a_token() -> None:
    def seconds(**groups: int) -> float:
        experts = replace(RUN.model.experts, **groups)  # type: ignore[arg-type]
        run = replace(RUN, model=replace(RUN.model, experts=experts), stack=replace(RUN.stack, forwards_tokens=True))
        return exchange_seconds(run, False)

    assert seconds(groups=4, groups_per_token=2) < 0.65 * seconds()
    assert seconds(groups=8, groups_per_token=4) == seconds()  # a node holds two groups: nothing is said


def test_only_recomputed_experts_exchange_again() -> None:
    def backward(**parallel: object) -> float:
        return exchange_seconds(replace(RUN, parallel=replace(RUN.parallel, **parallel)), True)  # type: ignore[arg-type]

    once = backward()
    assert backward(recompute="selective") == once == exchange_seconds(RUN, False)
    assert backward(recompute="full") == backward(recompute="selective", recompute_modules=("moe",)) == 2 * once


def test_nothing_is_exchanged_without_expert_parallelism() -> None:
    assert exchange_seconds(replace(RUN, parallel=ParallelShape(dp=32)), False) == 0.0
    assert exchange_seconds(replace(RUN, model=replace(RUN.model, experts=None)), False) == 0.0
