"""What hosts of published runs wait for: by stack, by node, by what graphs launch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.hardware.cluster import Cluster
from benchmarks.validation.hosts import HOSTS, MEGATRON_HOST, OTHER_HOST, PACE, TRAY_BATCH_SECONDS, Host, host_of
from benchmarks.validation.runs import ModelShape, ParallelShape, Stack, TrainingRun

RUN = TrainingRun(
    model=ModelShape(family="gpt", hidden=512, ffn=2048, layers=4, heads=8, kv_heads=8, vocab=2048, seq_len=256),
    parallel=ParallelShape(),
    stack=Stack(name="megatron-tests"),
    cluster=Cluster.parse("1x8 A100-80"),
)


def on(cluster: str, **stack: object) -> Host:
    changed = replace(RUN.stack, **stack)  # type: ignore[arg-type]
    return host_of(replace(RUN, cluster=Cluster.parse(cluster), stack=changed), "t0")


def test_constants_are_those_of_the_stack_at_the_pace_of_the_node() -> None:
    assert on("1x8 A100-80") == MEGATRON_HOST
    assert on("1x8 A100-80", name="megatron-deepspeed") == HOSTS["megatron-deepspeed"]
    assert on("1x8 A100-80", name="unheard-of") == OTHER_HOST
    assert on("1x8 H100-SXM").kernel_seconds == pytest.approx(PACE["H100-SXM"] * MEGATRON_HOST.kernel_seconds)


def test_graphs_of_layers_launch_kernels_but_not_the_exchange_of_tokens() -> None:
    host = on("1x8 A100-80", cuda_graph="layers")
    assert (host.kernel_seconds, host.collective_seconds) == (0.0, 0.0)
    assert (host.experts_seconds, host.step_seconds) == (MEGATRON_HOST.experts_seconds, MEGATRON_HOST.step_seconds)
    assert on("1x8 A100-80", cuda_graph="step") == Host()


def test_the_ablation_knows_no_host() -> None:
    assert host_of(RUN, "physics") == Host()


def test_only_tests_on_one_tray_wait_for_their_batches() -> None:
    assert on("1x4 GB200").batch_seconds == TRAY_BATCH_SECONDS
    assert on("1x8 GB200").batch_seconds == on("1x4 GB200", name="megatron").batch_seconds == 0.0
