"""Small steps run again as little as their memory allows, across segments and within the last one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar.plans.parallel_plan import Plan
from benchmarks.recomputation.models import UNet


class Net(nn.Module):
    """A U-Net, and a loss. forward(x (8, 3, 16, 16)) -> sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().sum()  # type: ignore[no-any-return]


class Flat(nn.Module):
    """One segment: forward(x (256, 8)) -> sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(a, b) / a) for a, b in [(8, 8)] * 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x.square().sum()


def made(kind: type[nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = kind().double()
    return model, torch.randn(*((8, 3, 16, 16) if kind is Net else (256, 8)), dtype=torch.float64)


@cache
def planned(kind: type[nn.Module], share: float | None, recompute: str | None = None) -> Plan:
    model, x = made(kind)
    limit = None if share is None else share * planned(kind, None).predicted.peak_bytes
    return autopar.plan(
        model, (x,), cluster="1 cpu", optimizer=torch.optim.SGD, memory_limit=limit, micro_batches=1,
        recompute=recompute, with_baselines=False,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "share"), [(Net, 0.8), (Net, 0.72), (Flat, 0.8)])
def test_a_plan_with_the_fewest_reruns_fits_computes_the_same_and_reads_again(kind, share):
    free, plan = planned(kind, None), planned(kind, share)
    assert plan.recomputed
    assert plan.predicted.peak_bytes <= share * free.predicted.peak_bytes
    assert plan.predicted.step_seconds > free.predicted.step_seconds
    assert plan.bound_seconds <= plan.objective_seconds
    (model, x), (plain, _) = made(kind), made(kind)
    plain(x).backward()
    module = autopar.compile(model, (x,), plan=plan)
    module(x).backward()
    for parameter, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    again = Plan.from_json(plan.to_json())
    name = next(iter(sorted(plan.recomputed)))
    assert "computed again" in str(again.explain(name))


def test_across_segments_less_runs_again_than_within_each():
    free, plan = planned(Net, None).predicted.step_seconds, planned(Net, 0.8).predicted.step_seconds
    assert plan / free - 1 < 0.045  # 5.1 % with segments only


def test_what_was_asked_of_recomputation_holds():
    assert planned(Flat, None, "full").recomputed == frozenset()  # its one segment is the last one, too
    assert planned(Flat, 0.8).recomputed
