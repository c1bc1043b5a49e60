"""What a step in parts pays once is priced once, is once in the program that runs, and is what is played."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

import autopar
from autopar.capture import Captures
from autopar.graphs.collective_nodes import is_start
from autopar.hardware.cluster import Cluster
from autopar.passes.lowering.chain import lowered_step
from autopar.planner.batch.micro_batch_program import in_parts
from autopar.program import MicroProgram
from autopar.questions import capture_model
from autopar.request import Request
from autopar.simulation import played_plan
from benchmarks.netlab.pipelines.traffic import sent_bytes
from tests.distributed.models import tied_model, tokens

PARTS = 3
CLUSTER = "1x2 H100-SXM"
APART = Cluster.parse("2x1 H100-SXM")
MODEL = tied_model()


@cache
def _planned(axis: str) -> autopar.Plan:
    return autopar.plan(
        MODEL, tokens(0, 12), cluster=CLUSTER, dims={axis: 2}, micro_batches=PARTS, optimizer=torch.optim.SGD,
        mode="fast", with_baselines=False,
    )  # fmt: skip


def _both(axis: str) -> list[autopar.Plan]:
    """In the same layouts: gathered in every part, and once."""
    return [_planned(axis).edit({"gather_once": once}) for once in (False, True)]


@cache
def _micro() -> MicroProgram:
    request = Request(cluster=Cluster.parse(CLUSTER))
    captured = capture_model(MODEL, (), tokens(0, 12), request, Captures())
    return in_parts(captured.program, PARTS, captured)


def _collectives(plan: autopar.Plan) -> Counter[str]:
    """Kind -> how many of them a step starts, where each is one of a gradient or a parameter."""
    found = Counter[str]()
    for _, module, times in lowered_step(_micro(), plan.with_(bucket_bytes={}), 0).only.runs:
        for node in module.graph.nodes:
            if is_start(node):
                found[str(node.target).split(".")[1]] += times
    return found


def test_gradients_that_stay_as_large_are_summed_once_per_step() -> None:
    each, once = map(_collectives, _both("dp_replicate"))
    assert each == once
    parameters = [p for p in MODEL.parameters() if p.requires_grad]
    assert each["all_reduce"] <= len(parameters) + PARTS * 2  # and the loss of every part


def test_parameters_are_gathered_and_gradients_scattered_once_where_the_plan_says_so() -> None:
    each, once = map(_collectives, _both("dp_shard"))
    assert each["reduce_scatter_tensor"] == PARTS * once["reduce_scatter_tensor"] > 0
    assert each["all_gather_into_tensor"] >= PARTS * once["all_gather_into_tensor"] > 0


def test_bytes_between_nodes_are_those_of_what_runs_once() -> None:
    plans = (*_both("dp_shard"), _planned("dp_replicate"))
    each, once, ddp = (sent_bytes(_micro().program, plan, APART)[0] for plan in plans)
    assert each > 0.9 * PARTS * once
    assert ddp == pytest.approx(once, rel=0.05)  # a gather and a scatter are a sum


def test_the_search_takes_the_shorter_of_both() -> None:
    each, once = _both("dp_shard")
    chosen = _planned("dp_shard")
    assert chosen.gather_once
    assert chosen.predicted.step_seconds <= min(each.predicted.step_seconds, once.predicted.step_seconds) * (1 + 1e-9)
    assert once.objective_seconds < each.objective_seconds
    assert once.predicted.peak_bytes > each.predicted.peak_bytes
    assert chosen.bound_seconds <= chosen.objective_seconds * (1 + 1e-9)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_what_is_predicted_is_the_step_that_is_played(axis: str) -> None:
    for plan in _both(axis):
        played = played_plan.simulate_plan(plan, _micro(), Cluster.parse(CLUSTER), torch.optim.SGD)
        assert played.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=0.02)
        assert max(played.peak_bytes) == pytest.approx(plan.predicted.peak_bytes, rel=0.02)
        assert plan.memory().peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.02)


def test_a_plan_says_that_it_gathers_once_and_its_file_keeps_it() -> None:
    each, once = _both("dp_shard")
    assert "gathers once per step" in once.summary()
    assert "gathers once" not in each.summary()
    assert autopar.Plan.from_json(once.to_json()).gather_once
    assert "first_forward" in once.code().text
    assert "gathers once" in each.diff(once)


def test_what_has_one_part_or_stages_does_not_take_the_edit() -> None:
    with pytest.raises(autopar.ConfigurationError, match="True or False"):
        _planned("dp_shard").edit({"gather_once": 1})
    whole = autopar.plan(MODEL, tokens(0, 12), cluster=CLUSTER, dims={"dp_shard": 2}, micro_batches=1, mode="fast",
        with_baselines=False)
    with pytest.raises(autopar.ConfigurationError, match="in one part"):
        whole.edit({"gather_once": True})
