"""Forms of saved values as a choice: what fits with them, what the device then holds, what they do to gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConfigurationError
from autopar.planner.memory.possible_forms import added_variance
from autopar.plans.parallel_plan import Plan
from benchmarks.emulated_device.budget import OutOfMemory
from benchmarks.emulated_device.device import EmulatedDevice
from tests.planner.one_mesh.test_host_labels import link

ROWS, WIDTH, DEPTH = 2048, 32, 3
EIGHT, FOUR = ({"recompute": "none", "lossy": lowest} for lowest in ("8bit", "4bit"))


class Block(nn.Module):
    """forward(x (2048, 32)) -> the same: a ReLU that is asked for signs alone, flags, and a GELU that a product reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(nn.functional.gelu(self.up(x)))
        side = torch.relu(self.side(x))
        return x + side.masked_fill(x > 1.5, 0.0)


class Blocks(nn.Module):
    """forward(x (2048, 32)) -> mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def blocks() -> tuple[Blocks, torch.Tensor]:
    torch.manual_seed(0)
    return Blocks(), torch.randn(ROWS, WIDTH)


@cache
def planned(share: float, **options: Any) -> Plan:
    """Under a part of the memory that the free plan takes."""
    model, x = blocks()
    limit = {} if share == 1.0 else {"memory_limit": f"{round(share * planned(1.0).predicted.peak_bytes)}B"}
    return autopar.plan(model, (x,), cluster="1 cpu", micro_batches=1, mode="fast", with_baselines=False, **limit,
                        **options)  # fmt: skip


def forms(plan: Plan) -> Mapping[str, int]:
    return Counter(plan.saved_smaller.values())


def gradients(plan: Plan, seed: int = 1) -> list[torch.Tensor]:
    """Of one step."""
    model, x = blocks()
    torch.manual_seed(seed)
    module = autopar.compile(model, (x,), plan=plan)
    module(x).backward()
    return [parameter.grad for parameter in module.parameters()]


def test_nothing_is_saved_smaller_where_memory_suffices() -> None:
    assert not forms(planned(1.0, lossy="2bit"))


def test_masks_alone_are_chosen_without_a_word_and_lose_nothing() -> None:
    plan = planned(0.75)
    assert forms(plan).keys() == {"mask"}
    assert all(torch.equal(mine, other) for mine, other in zip(gradients(plan), gradients(planned(1.0)), strict=True))


def test_what_is_not_made_again_is_rounded_to_as_few_bits_as_are_allowed() -> None:
    eight, four = planned(0.6, **EIGHT), planned(0.6, **FOUR)
    assert forms(eight).keys() <= {"mask", "8bit"}
    assert forms(four)["4bit"]
    assert four.objective_seconds <= eight.objective_seconds


@pytest.mark.parametrize(("share", "options"), [(0.75, {}), (0.6, EIGHT), (0.6, FOUR)])
def test_the_device_holds_what_was_predicted(share: float, options: Mapping[str, Any]) -> None:
    plan = planned(share, **options)
    assert forms(plan)
    model, x = blocks()
    module = autopar.compile(model, (x,), plan=plan)
    module(x).backward()
    predicted = round(plan.predicted.peak_bytes - plan.predicted.bytes_by_kind["optimizer state"])
    assert _peak(module, x, predicted * 1.02) == pytest.approx(predicted, rel=0.02)
    with pytest.raises(OutOfMemory):
        _peak(module, x, 0.97 * predicted)


def _peak(module: nn.Module, x: torch.Tensor, limit: float) -> int:
    """Most bytes of the emulated device in a step."""
    module.zero_grad()
    with EmulatedDevice(link(), device_bytes=round(limit), known=[x, *module.parameters()]) as device:
        module(x).backward()
    return device.budget.peak_bytes


def test_a_plan_with_forms_is_explained_edited_and_read_again() -> None:
    plan = Plan.from_json(planned(0.6, **FOUR).to_json())
    name = next(name for name, form in plan.saved_smaller.items() if form == "4bit")
    assert "in 4 bits a value" in str(plan.explain(name))
    assert "variance" in str(plan.statistics["saved smaller"])
    assert plan.saved_smaller == planned(0.6, **FOUR).saved_smaller
    for wrong in ({"saved_as": "3bit"}, {"recompute": True}):
        operators = {**plan.operators, name: replace(plan.operators[name], **wrong)}
        with pytest.raises(ConfigurationError, match="saved_as"):
            Plan.from_json(replace(plan, operators=operators).to_json())


def test_bits_are_checked_when_asked_for() -> None:
    with pytest.raises(ConfigurationError, match="write one of none, 8bit"):
        planned(1.0, lossy="8bits")
    with pytest.raises(ConfigurationError, match="equal bits"):
        autopar.plan(*blocks(), cluster="1 cpu", lossy="8bit", deterministic=4)
    with pytest.raises(ConfigurationError, match="stages save values as they are"):
        autopar.plan(*blocks(), cluster="2 cpu", lossy="8bit", dims={"pp": 2}, with_baselines=False)


@pytest.mark.exhaustive(sample="4bit")
@pytest.mark.parametrize("form", ["8bit", "4bit"])
def test_gradients_keep_their_mean_and_vary_as_was_said(form: str) -> None:
    """What a product reads, in 60 draws; a constant that is added to what is rounded would be seen."""
    model, x = blocks()
    x = x[:32]
    exact = autopar.compile(copy.deepcopy(model), (x,), cluster="1 cpu")
    exact(x).backward()
    plan = exact.plan
    name = next(name for name in plan.operators if "gelu" in name)
    plan = replace(plan, operators={**plan.operators, name: replace(plan.operators[name], saved_as=form)})
    module = autopar.compile(model, (x,), plan=plan)
    weight, found = "layers.0.down.weight", []
    for _ in range(60):
        module.zero_grad()
        module(x).backward()
        found.append(module.get_parameter(weight).grad.clone())
    draws, truth = torch.stack(found).double(), exact.get_parameter(weight).grad.double()
    deviation = draws.std(0)
    off = (draws.mean(0) - truth) / (deviation / len(draws) ** 0.5 + 1e-12)
    assert off.square().mean() == pytest.approx(1.0, abs=0.25)
    assert added_variance(8) < added_variance(4) < 0.03
    with pytest.raises(ConfigurationError, match="right in the mean"):
        autopar.verify(module, (x,))
