"""Chunks of exchanges: the number whose played step is the shortest, if that is worth it and fits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.hardware.cluster import Cluster
from autopar.passes.lowering.chain import add_up_parts, lowered_step
from autopar.planner.one_mesh.bucket_sizes import LEAST_GAIN, issues
from autopar.planner.one_mesh.exchange_chunks import Played, in_chunks, in_exchange_chunks
from autopar.planner.planning import make_plan
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_entries import EXCHANGES
from autopar.plans.plan_value import Prediction
from autopar.program import Program
from autopar.request import Request

ROOM, GPUS = 10.0, "4x1 H100-SXM"


def chosen(*seconds: float, exposed: float = 0.5, peaks: tuple[float, ...] = (1.0,) * 4) -> Plan:
    """Of plans whose steps take so long as they come, in turns, in 2 and in 4 chunks."""

    def played(number: int, plan: Plan) -> Played:
        prediction = Prediction(
            step_seconds=seconds[number], peak_bytes=peaks[number], exposed_communication_seconds=exposed
        )
        return replace(plan, predicted=prediction), np.array([peaks[number]])

    def play(plan: Plan) -> Played:
        return played((0, 1, 2, 2, 3)[plan.product_chunks[EXCHANGES]], plan)

    return in_exchange_chunks(played(0, empty()), play, ROOM)[0]


@cache
def empty() -> Plan:
    """A plan of a program without anything."""
    return planned(capture(nn.Linear(4, 4), (torch.ones(4, 4),), {}), "1 cpu")


def planned(program: Program, cluster: str, **dims: int) -> Plan:
    """Without baselines."""
    request = Request(cluster=Cluster.parse(cluster), mode="fast", with_baselines=False)
    return make_plan(program, replace(request, dims=dims, ep="dispatch") if dims else request)


def test_the_shortest_step_that_fits_is_taken_and_said() -> None:
    plan = chosen(1.0, 0.9, 0.8, 0.7)
    assert plan.product_chunks == {EXCHANGES: 4}
    assert "back before gradients of weights 900 ms, 2 chunks 800 ms, 4 chunks 700 ms)" in plan.notes[-1]
    assert chosen(1.0, 0.9, 0.8, 0.85).product_chunks == {EXCHANGES: 2}
    assert chosen(1.0, 0.9, 0.95, 0.1).product_chunks == {EXCHANGES: 1}, "more than what did not help is not tried"
    assert chosen(1.0, 0.9, 0.8, 0.7, peaks=(1.0, 1.0, ROOM + 1, 1.0)).product_chunks == {EXCHANGES: 1}


def test_what_saves_less_than_a_hundredth_stays_as_it_comes() -> None:
    plan = chosen(1.0, 0.995, 0.995, 0.5)
    assert plan.product_chunks == {}
    assert not any("travel" in note for note in plan.notes)
    assert chosen(1.0, 0.5, 0.5, 0.5, exposed=0.001).product_chunks == {}, "nothing is left to hide"


class Wide(nn.Module):
    """Two layers of experts of which each token takes two: (B, S, D), (B, S, 2) -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(8, 2048, 4096))
        self.down = nn.Parameter(torch.empty(8, 4096, 2048))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows, ids = x.unsqueeze(2).expand(-1, -1, 2, -1).reshape(-1, x.shape[-1]), chosen.reshape(-1)
        rows = nn.functional.silu(torch.ops.autopar.expert_linear(rows, self.up, ids, False))
        rows = torch.ops.autopar.expert_linear(rows, self.down, ids, False)
        return (x + rows.view(*x.shape[:2], 2, -1).sum(2)).square().mean(dim=(1, 2)).sum()


@cache
def wide() -> Program:
    """Experts and tokens without values, in bf16."""
    with torch.device("meta"):
        x = torch.empty(8, 4096, 2048, dtype=torch.bfloat16, requires_grad=True)
        return capture(Wide().bfloat16(), (), {"x": x, "chosen": torch.empty(8, 4096, 2, dtype=torch.int64)})


def test_between_nodes_of_gpus_the_chunks_are_those_of_the_shortest_step() -> None:
    plan = planned(wide(), GPUS, ep=4)
    seconds = {count: played(in_chunks(plan, count)) for count in (1, 2, 4)}
    seconds[0] = played(plan.with_(product_chunks={}))
    best = min(seconds, key=seconds.__getitem__)
    assert seconds[plan.product_chunks[EXCHANGES]] <= (1.0 + LEAST_GAIN) * seconds[best]
    assert best > 1, seconds
    assert seconds[best] < 0.95 * seconds[0], seconds


def test_on_cpus_nothing_is_cut() -> None:
    assert planned(wide(), "4x1 cpu", ep=4).product_chunks == {}


def played(plan: Plan) -> float:
    """Seconds of forward and backward, with the fastest buckets."""
    cluster, runs = Cluster.parse(GPUS), lowered_step(wide(), plan, 0, until=add_up_parts).only.runs
    return next(issues(runs, cluster=cluster, mesh=plan.mesh, backend=plan.kernel_backend)).seconds
