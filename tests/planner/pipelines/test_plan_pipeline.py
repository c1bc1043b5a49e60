"""Plans of pinned pipelines: through the facade, with predicted step, bubble and peaks, and refusals with reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.demo.gpt import GPT, GPTConfig
from autopar.errors import ConfigurationError, InfeasibleError
from autopar.planner.pipelines.plan_pipeline import micro_batch_counts
from autopar.plans.parallel_plan import Plan


def _plan(batch: int = 8, **options: Any) -> Plan:
    model = GPT(GPTConfig(vocabulary=64, positions=16, width=32, heads=4, layers=4))
    tokens = torch.zeros(batch, 16, dtype=torch.long)
    return autopar.plan(model, (tokens, tokens), cluster="4 cpu", mode="fast", **options)


def test_stages_and_tensor_parallelism() -> None:
    plan = _plan(dims={"pp": 2, "tp": 2}, schedule="1f1b", micro_batches=4)
    assert plan.mesh.axis_names == ("pp", "tp")
    assert plan.layout_mesh.shape == (2,)
    assert plan.pipeline is not None
    assert plan.pipeline.schedule == "1f1b"
    assert [stage.rank_group for stage in plan.pipeline.stages] == [0, 1]
    assert plan.pipeline.stages[0].last_operator == "layers.1/add#1"
    assert plan.micro_batches == 4
    assert Plan.from_json(plan.to_json()).pipeline == plan.pipeline
    assert 0 < plan.bound_seconds < plan.objective_seconds
    assert plan.predicted.step_seconds <= plan.objective_seconds, "collectives beside computation are never slower"
    assert plan.gap == pytest.approx(1 - plan.bound_seconds / plan.objective_seconds)
    assert 0 < float(plan.statistics["bubble"]) < 1
    words = plan.summary()
    assert "2 stages on 2 groups of 2 devices, 1f1b, 4 micro-batches, bubble" in words
    assert "stage 1 on group 1 (layers.2 .. norm, head): forward" in words
    peaks = next(note for note in plan.notes if note.startswith("peak of each group: "))
    assert peaks.count("B") == 2
    assert peaks.endswith(str(plan.statistics["peak_bytes_by_rank_group"]))


def test_equal_stages_in_a_row_are_one_line() -> None:
    model = GPT(GPTConfig(vocabulary=64, positions=16, width=32, heads=4, layers=6))
    tokens = torch.zeros(8, 16, dtype=torch.long)
    plan = autopar.plan(
        model, (tokens, tokens), cluster="4 H100-SXM", dims={"pp": 4}, schedule="interleaved", micro_batches=4,
        with_baselines=False,
    )
    stages = [note for note in plan.notes if note.startswith("stage")]
    assert plan.pipeline is not None
    assert len(plan.pipeline.stages) == 8
    assert any(note.startswith("stages 1 to 5 (layers.0 .. layers.4), each: forward ") for note in stages)
    assert len(stages) == 4


def test_the_schedule_and_the_micro_batches_are_chosen() -> None:
    plan = _plan(batch=4, dims={"pp": 4})
    assert plan.pipeline is not None
    assert plan.micro_batches > 1
    assert any(note.startswith("other schedules: ") for note in plan.notes)


def test_families_that_follow_times_list_their_actions() -> None:
    plan = _plan(dims={"pp": 2, "tp": 2}, schedule="zb-1p", micro_batches=4)
    assert plan.pipeline is not None
    assert len(plan.pipeline.actions) == 2
    assert plan.pipeline.built(4).num_stages == 2


def test_an_order_is_searched_where_it_is_asked_for() -> None:
    plan = _plan(dims={"pp": 2, "tp": 2}, schedule="searched", micro_batches=4)
    known = _plan(dims={"pp": 2, "tp": 2}, schedule="zb-h1", micro_batches=4)
    assert plan.pipeline is not None
    assert plan.pipeline.schedule == "searched"
    assert len(plan.pipeline.actions) == 2
    assert any("no order of these stages on these rank groups takes less than" in note for note in plan.notes)
    assert plan.predicted.step_seconds <= known.predicted.step_seconds * (1 + 1e-9)


def test_stages_recompute_where_memory_is_short() -> None:
    free = _plan(dims={"pp": 2, "tp": 2}, schedule="gpipe", micro_batches=4)
    tight = 0.75 * free.predicted.peak_bytes
    plan = _plan(dims={"pp": 2, "tp": 2}, schedule="gpipe", micro_batches=4, memory_limit=tight)
    assert plan.predicted.peak_bytes <= tight
    assert any(operator.recompute for operator in plan.operators.values())
    assert any("recomputes: " in note for note in plan.notes)


def test_parameters_are_gathered_once_per_step() -> None:
    plan = _plan(dims={"pp": 2, "dp_shard": 2}, schedule="1f1b", micro_batches=4)
    assert plan.pipeline is not None
    assert all(stage.gather_once for stage in plan.pipeline.stages)
    without = _plan(dims={"pp": 4}, schedule="1f1b", micro_batches=4)
    assert without.pipeline is not None
    assert not any(stage.gather_once for stage in without.pipeline.stages)


def test_a_limit_that_nothing_fits_is_refused() -> None:
    with pytest.raises(
        InfeasibleError, match=r"no pipeline of 2 groups .* fits 20\.0 KiB per device: it needs [0-9.]+ KiB"
    ):
        _plan(dims={"pp": 2, "tp": 2}, schedule="1f1b", micro_batches=4, memory_limit="20KiB")


class Normalised(nn.Module):
    """A batch norm mixes samples: no batch of it can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def test_a_batch_that_cannot_be_cut_says_why() -> None:
    with pytest.raises(ConfigurationError, match=r"pp=2: stages take the batch in parts, .*layers\.1"):
        autopar.plan(Normalised(), (torch.ones(8, 4),), cluster="2 cpu", dims={"pp": 2}, with_baselines=False)


def test_too_few_blocks_say_so() -> None:
    with pytest.raises(ConfigurationError, match="6 pieces of the model do not fill 8 stages"):
        _plan(dims={"pp": 4}, schedule="interleaved")


def test_counts_of_micro_batches_divide_the_batch() -> None:
    assert micro_batch_counts(256, 4) == [4, 8, 16, 32]
    assert micro_batch_counts(8, 2) == [2, 4, 8]
    assert micro_batch_counts(6, 4) == [3, 6]
    assert micro_batch_counts(7, 2) == [7]
    assert micro_batch_counts(1, 2) == []
