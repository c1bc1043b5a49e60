"""What the pipeline benchmark makes of its rows, and the bytes that it predicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.hardware.cluster import Cluster
from benchmarks.netlab.pipelines.__main__ import compared, part_of, summary
from benchmarks.netlab.pipelines.settings import SETTINGS, Setting
from benchmarks.netlab.pipelines.traffic import sent_bytes

SMALL = Setting(preset="flat-200mbit", layers=2, width=16, positions=8, batch=4, vocabulary=32, heads=2)
CLUSTER = Cluster.parse("2x1 cpu @ 0.2Gb")
ACTIVATION = 4 * 2 * 8 * 16
"""Bytes of one micro-batch of 2 samples between two stages."""
TIED = 4 * 32 * 16
"""Bytes of the embedding that the head shares: both stages hold it."""


def _plan(**wishes: Any) -> autopar.Plan:
    model, inputs = SMALL.model_and_inputs()
    return autopar.plan(model, inputs, cluster=CLUSTER, optimizer=torch.optim.SGD, mode="fast", **wishes)


@pytest.mark.exhaustive
def test_stages_send_activations_gradients_and_the_gradient_of_what_both_hold() -> None:
    plan = _plan(dims={"pp": 2}, micro_batches=2, schedule="1f1b")
    assert sent_bytes(part_of(SMALL, plan), plan, CLUSTER) == [2 * ACTIVATION + TIED, 2 * ACTIVATION + TIED]


@pytest.mark.exhaustive
def test_data_parallelism_sends_every_gradient_once_around_the_ring() -> None:
    plan = _plan(dims={"dp_replicate": 2}, micro_batches=1)
    model: nn.Module = SMALL.model_and_inputs()[0]
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    sent = sent_bytes(part_of(SMALL, plan), plan, CLUSTER)
    assert sent == pytest.approx([parameters, parameters], rel=1e-2)  # and the sum of the loss


def _row(seconds: float, loss: float, sent: int) -> dict[str, Any]:
    return {"seconds": seconds, "loss": loss, "sent_bytes": [sent, 0]}


def test_rows_become_medians_beside_predictions() -> None:
    predicted = {"plan": "", "step_seconds": 1.5, "sent_bytes": [100.0, 0.0]}
    rows = [_row(seconds, 1.0, 97) for seconds in (1.0, 2.0, 9.0)]
    found = compared(rows, predicted)
    assert found["step_seconds"] == 2.0
    slow = {**found, "step_seconds": 8.0, "predicted_step_seconds": 3.0}
    losses = {"pipeline": [1.0, 2.0], "without": [1.0, 2.02]}
    numbers = summary({"pipeline": found, "without": slow}, losses)
    assert (numbers["factor"], numbers["predicted_factor"]) == (4.0, 2.0)
    assert numbers["factor_error"] == -0.5
    assert numbers["bytes_error"]["pipeline"] == pytest.approx(0.03)
    assert numbers["largest_difference_of_losses"] == pytest.approx(0.0099, rel=1e-2)


def test_every_setting_has_more_blocks_than_ranks() -> None:
    assert all(setting.layers >= 4 for setting in SETTINGS.values())


def test_what_stays_inside_of_a_node_is_on_no_link() -> None:
    model, inputs = SMALL.model_and_inputs()
    cluster = Cluster.parse("2x2 cpu @ 0.2Gb")
    dims = {"dp_replicate": 2, "dp_shard": 2}
    plan = autopar.plan(
        model, inputs, cluster=cluster, optimizer=torch.optim.SGD, mode="fast", dims=dims, micro_batches=1,
        with_baselines=False,
    )
    flat = Cluster.parse("4x1 cpu @ 0.2Gb")
    part = part_of(SMALL, plan)
    assert 0.0 < sum(sent_bytes(part, plan, cluster)) < 0.5 * sum(sent_bytes(part, plan, flat))
