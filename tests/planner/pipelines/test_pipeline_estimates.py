"""The order in which the free search looks at pipelines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from autopar.hardware.cluster import Cluster
from autopar.layouts.placement import Mesh
from autopar.planner.one_mesh.query import Query
from autopar.planner.pipelines.compared_pipelines import in_order
from autopar.planner.pipelines.pipeline_estimates import PipelineEstimate, PipelineTraffic, estimates, formula_seconds
from autopar.planner.problem.limits import LIMITS

LARGE = Cluster.parse("2048x8 H100-SXM")
LLAMA = PipelineTraffic(
    samples=2048,
    work_seconds=5.0,
    num_blocks=126,
    num_cuts=252,
    num_operators=5000,
    cut_bytes=2048 * 8192 * 16384 * 2.0,
    parameter_bytes=405e9 * 4.0,
    state_bytes=405e9 * 12.0,
)


def _query(cluster: Cluster, count: int | None = None) -> Query:
    return cast("Query", SimpleNamespace(cluster=cluster, budget_bytes=75e9, micro_batches=count))


def test_fewer_groups_and_more_micro_batches_wait_less() -> None:
    steps = [formula_seconds(LLAMA, LARGE, 16, 128, 8, count) for count in (4, 8, 16)]
    assert steps == sorted(steps, reverse=True)
    assert formula_seconds(LLAMA, LARGE, 16, 1024, 1, 2) > formula_seconds(LLAMA, LARGE, 16, 128, 8, 16)


def test_data_ranks_that_share_a_sample_cost_more() -> None:
    alone, shared = (formula_seconds(LLAMA, LARGE, 16, 128, 8, count) for count in (16, 32))
    bubble = (1 + 15 / (8 * 16)) / (1 + 15 / (8 * 32))  # eight interleaved stages a rank
    assert shared * bubble > 1.05 * alone


def test_blocks_that_can_be_interleaved_wait_less() -> None:
    as_many_blocks_as_ranks = replace(LLAMA, num_blocks=14)
    interleaved, plain = (formula_seconds(model, LARGE, 16, 128, 8, 16) for model in (LLAMA, as_many_blocks_as_ranks))
    assert interleaved < 0.9 * plain


def test_meshes_are_data_times_tensor_inside_of_a_node() -> None:
    found = estimates(_query(LARGE), LLAMA)
    assert {one.mesh.shape for one in found if one.groups == 16} >= {(128, 8), (256, 4), (512, 2), (1024,)}
    assert any(len(one.mesh.shape) == 3 and one.mesh.shape[2] == 8 for one in found)
    assert all(one.mesh.size * one.groups == LARGE.num_devices for one in found)
    assert all(one.mesh.shape[-1] <= 8 for one in found if len(one.mesh.shape) > 1)
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert len({(one.count, one.mesh) for one in found}) == len(found)


def test_a_number_of_micro_batches_that_is_asked_for_is_the_only_one() -> None:
    assert {one.count for one in estimates(_query(LARGE, 32), LLAMA)} == {32}


def test_no_more_groups_than_pieces_of_the_model() -> None:
    shallow = PipelineTraffic(
        samples=64,
        work_seconds=1.0,
        num_blocks=2,
        num_cuts=2,
        num_operators=40,
        cut_bytes=1e6,
        parameter_bytes=1e6,
        state_bytes=3e6,
    )
    found = estimates(_query(Cluster.parse("4x8 H100-SXM")), shallow)
    assert {one.groups for one in found} == {2, 4}


def test_those_with_as_many_micro_batches_come_together() -> None:
    def one(count: int, seconds: float) -> PipelineEstimate:
        return PipelineEstimate(groups=2, count=count, mesh=Mesh(("inner",), (2,)), seconds=seconds)

    given = [one(8, 1.0), one(4, 1.01), one(8, 1.1), one(8, 1.3), one(4, 1.4)]
    assert [(g.count, g.seconds) for g in in_order(given)] == [(8, 1.0), (8, 1.1), (4, 1.01), (8, 1.3), (4, 1.4)]
    many = [one(8, 1.0 + number / 100) for number in range(LIMITS.most_together + 1)]
    assert [g.count for g in in_order([many[0], one(4, 1.005), *many[1:]])] == [8] * LIMITS.most_together + [4, 8]


def test_a_slow_border_takes_as_long_as_what_crosses_it() -> None:
    fast, slow = (Cluster.parse(f"2x8 A100-80 @ {rate}Gb") for rate in (1000, 1))
    small = replace(LLAMA, samples=32, cut_bytes=32 * 4096 * 4096 * 2.0, parameter_bytes=16e9, state_bytes=48e9)
    crossing = small.cut_bytes / (8 * 1e9 / 8)
    assert formula_seconds(small, fast, 2, 8, 1, 4) < 7.0
    assert 8 * crossing < formula_seconds(small, slow, 2, 8, 1, 4) - formula_seconds(small, fast, 2, 8, 1, 4)
    assert estimates(_query(slow), small)[0].groups == 2


def test_micro_batches_of_one_sample_come_behind_others_that_are_as_fast() -> None:
    shapes = [(one.count, one.seconds) for one in estimates(_query(LARGE, 64), replace(LLAMA, samples=64))]
    others = [(one.count, one.seconds) for one in estimates(_query(LARGE, 32), replace(LLAMA, samples=64))]
    plain = {count: formula_seconds(replace(LLAMA, samples=64), LARGE, 16, 128, 8, count) for count in (32, 64)}
    assert min(seconds for _, seconds in shapes) > 0.0
    assert any(seconds == pytest.approx(plain[64] * 1.03) for _, seconds in shapes)
    assert any(seconds == pytest.approx(plain[32]) for _, seconds in others)


def test_on_cpus_every_further_micro_batch_starts_all_operators_again() -> None:
    cluster = Cluster.parse("4x1 cpu")
    small = PipelineTraffic(
        samples=4096, work_seconds=0.5, num_blocks=6, num_cuts=6, num_operators=200, cut_bytes=1e4,
        parameter_bytes=1e6, state_bytes=2e6,
    )  # fmt: skip
    few, many = (formula_seconds(small, cluster, 4, 1, 1, count) for count in (16, 4096))
    assert many - few == pytest.approx(4080 * 200 / 4 * cluster.device.launch_seconds, rel=0.3)
    assert estimates(_query(cluster), small)[0].count < 4096
