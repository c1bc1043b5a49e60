"""Pipelines on devices of several kinds: shares by speed and memory, against all cuts, written, lowered, refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import autopar
from autopar.cost_models.schedule_player import play_pipeline, schedule_for
from autopar.demo.gpt import GPT, GPTConfig
from autopar.errors import ConfigurationError, InfeasibleError
from autopar.hardware.cluster import Cluster, MixedCluster
from autopar.planner.pipelines.block_table import BlockTable
from autopar.planner.pipelines.mixed_devices import group_sizes
from autopar.planner.pipelines.solved_submeshes import SubMesh
from autopar.planner.pipelines.stage_search import CutQuestion
from autopar.planner.pipelines.unequal_groups import best_unequal
from autopar.plans.parallel_plan import Plan
from autopar.request.pipeline_request import PipelineRequest, pipeline_request
from tests.planner.pipelines.lowered import lower_every_stage
from tests.planner.pipelines.random_tables import least_of_all_cuts, random_table

LAYERS = 6


def cluster_of_speeds(*parts: tuple[int, float], memory_bytes: int | None = None) -> MixedCluster:
    """Parts of so many CPU processes each, so many times as fast; memory_bytes: of a device of the first part."""
    made = []
    for number, (devices, speed) in enumerate(parts):
        plain = Cluster.parse(f"{devices} cpu")
        device = replace(
            plain.device,
            name=f"CPU {number}",
            flops_per_second={dtype: speed * rate for dtype, rate in plain.device.flops_per_second.items()},
            memory_bytes_per_second=speed * plain.device.memory_bytes_per_second,
            launch_seconds=plain.device.launch_seconds / speed,
            memory_bytes=memory_bytes if memory_bytes and not number else plain.device.memory_bytes,
        )
        made.append(replace(plain, device=device))
    return MixedCluster.of(made)


def _model(layers: int = LAYERS) -> GPT:
    return GPT(GPTConfig(vocabulary=64, positions=16, width=32, heads=4, layers=layers))


def _plan(cluster: MixedCluster | str, layers: int = LAYERS, **options: Any) -> Plan:
    tokens = torch.zeros(12, 16, dtype=torch.long)
    return autopar.plan(_model(layers), (tokens, tokens), cluster=cluster, **{"mode": "fast", **options})


def _layers_of(plan: Plan) -> dict[int, int]:
    """Layers by the first rank of their stage."""
    assert plan.pipeline is not None
    ends = [stage.last_operator for stage in plan.pipeline.stages[:-1]]
    numbers = [0, *(int(str(end).split("layers.")[1].split(".")[0].split("/")[0]) + 1 for end in ends), LAYERS]
    groups = [plan.rank_groups[stage.rank_group].first_rank for stage in plan.pipeline.stages]
    return {rank: numbers[n + 1] - numbers[n] for n, rank in enumerate(groups)}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return _plan(cluster_of_speeds((1, 1.0), (2, 3.0)), dims={"pp": [1, 2]}, micro_batches=6)


@pytest.fixture(scope="module")
def equal() -> Plan:
    return _plan(cluster_of_speeds((1, 1.0), (1, 1.0)), micro_batches=6, schedule="1f1b")


@pytest.mark.exhaustive
def test_stages_of_the_faster_kind_get_more_layers_in_proportion(equal: Plan) -> None:
    """One device each: 1 or 2 of 6 layers on the slow one, where the other is three times as fast; 3 on equal ones."""
    layers = _layers_of(_plan(cluster_of_speeds((1, 1.0), (1, 3.0)), micro_batches=6, schedule="1f1b"))
    assert layers[0] + layers[1] == LAYERS
    assert layers[0] == pytest.approx(1.5, abs=0.5)
    assert _layers_of(equal)[0] == pytest.approx(3, abs=1)
    assert layers[0] < _layers_of(equal)[0]


def test_a_part_with_little_memory_gets_fewer_layers(equal: Plan) -> None:
    cluster = cluster_of_speeds((1, 1.0), (1, 1.0), memory_bytes=int(0.7 * equal.predicted.peak_bytes))
    tight = _plan(cluster, micro_batches=6, schedule="1f1b", recompute="none")
    assert _layers_of(tight)[0] < _layers_of(equal)[0]


def test_the_plan_says_which_kind_runs_which_stages(plan: Plan) -> None:
    assert plan.pipeline is not None
    assert sorted((group.first_rank, group.size) for group in plan.rank_groups) == [(0, 1), (1, 2)]
    assert plan.cluster == "1x1 CPU + 1x2 CPU"
    summary = plan.summary()
    assert "ranks 0 .. 0 (CPU 0)" in summary
    assert "ranks 1 .. 2 (CPU 1)" in summary
    assert "kinds of devices: CPU " in summary
    assert 0 < plan.bound_seconds < plan.objective_seconds
    assert Plan.from_json(plan.to_json()) == plan


def test_every_stage_is_lowered_for_every_rank(plan: Plan) -> None:
    lower_every_stage(_model(), torch.zeros(2, 16, dtype=torch.long), plan)


def test_two_parts_of_one_kind_are_planned_as_one_cluster_of_two_nodes() -> None:
    part = Cluster.parse("1x2 cpu")
    options: dict[str, Any] = {"dims": {"pp": [2, 2]}, "micro_batches": 4}
    one = _plan("2x2 cpu", layers=2, **options)
    two = _plan(MixedCluster.of([part, part]), layers=2, **options)
    assert one.pipeline is not None
    assert two.pipeline is not None
    assert two.predicted.step_seconds == pytest.approx(one.predicted.step_seconds, rel=1e-9)
    assert two.pipeline.stages == one.pipeline.stages
    assert two.bound_seconds <= one.bound_seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_the_pipeline_is_the_best_of_all_cuts_and_pays_the_link_between_parts(seed: int) -> None:
    """On random costs of 5 blocks, on 1 and 2 devices; played again by hand, where other sends give other steps."""
    rng = np.random.default_rng(seed)
    slow = rng.uniform(0.5, 3.0, 4)
    tables = [
        replace(random_table(rng, 5, devices, group, 30.0), across_seconds=slow)
        for group, devices in ((0, 1), (1, 1), (1, 2))
    ]
    found = best_unequal([_sub(table) for table in tables], [(1, 1), (2, 2)], 4, families=["1f1b"])
    assert found is not None
    shared = tuple(table.with_shares(4) for table in tables)
    question = CutQuestion(tables=shared, devices=(1, 2), micro_batches=4, in_flight=(1, 2, 3), least_stages=2)
    cut = found.pipeline.cut
    assert cut.objective_seconds == pytest.approx(least_of_all_cuts(question), rel=1e-12)
    chosen = [tables[stage.table] for stage in cut.stages]
    stages = [table.stage(s.first, s.end, s.mode) for table, s in zip(chosen, cut.stages, strict=True)]
    sends = [
        float((slow if here.group != behind.group else here.send_seconds)[stage.end - 1])
        for here, behind, stage in zip(chosen, chosen[1:], cut.stages, strict=False)
    ]
    schedule = schedule_for("1f1b", stages, len(stages), 4)
    assert play_pipeline(stages, schedule, send_seconds=sends).step_seconds == pytest.approx(
        found.pipeline.step_seconds, rel=1e-12
    )
    free = [0.0 for _ in sends]
    assert play_pipeline(stages, schedule, send_seconds=free).step_seconds < found.pipeline.step_seconds
    ranks = [rank for sub, first in zip(found.subs, found.first_ranks, strict=True)
             for rank in range(first, first + sub.table.devices)]  # fmt: skip
    assert sorted(ranks) == [0, 1, 2]
    assert found.first_ranks[[table.group for table in chosen].index(0)] == 0


def _sub(table: BlockTable) -> SubMesh:
    """A sub-mesh of which nothing but the costs is looked at."""
    unused: Any = None
    return SubMesh(query=unused, solved=unused, solution=unused, runs=unused, tables=[table])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dims": {"tp": 2}}, ConfigurationError, "leave out mesh= and all axes but pp"),
        ({"mesh": [2]}, ConfigurationError, "leave out mesh="),
        ({"dims": {"pp": 1}}, ConfigurationError, "a stage on each of its 2 parts"),
        ({"schedule": "interleaved"}, ConfigurationError, "write one of 1f1b"),
        ({"micro_batches": 5}, ConfigurationError, "the batch cannot be cut.*or plan for one part"),
        ({"micro_batches": 2, "memory_limit": 2**15}, InfeasibleError, "fits 32.0 KiB of CPU 0, 32.0 KiB of CPU 1"),
    ],
)
def test_questions_without_an_answer_say_what_to_do(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        _plan(cluster_of_speeds((1, 1.0), (1, 3.0)), layers=2, **options)


def test_groups_are_nodes_parts_and_halves_of_nodes() -> None:
    cluster = Cluster.parse("1x8 H100-SXM + 2x8 A100-80")
    assert isinstance(cluster, MixedCluster)
    free = pipeline_request(cluster, None, {"pp": -1}, None)
    assert free == pipeline_request(cluster, None, None, None)
    assert [group_sizes(part, free) for part in cluster.parts] == [[8, 4], [8, 16, 4]]
    pinned = PipelineRequest(num_groups=3, dims={}, sizes=(4, 4, 16))
    assert [group_sizes(part, pinned) for part in cluster.parts] == [[4], [4, 16]]
