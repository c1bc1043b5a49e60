"""Alpa's settings: plans that use all devices, and models that compute what they say."""

from __future__ import annotations

import pytest
import torch

from benchmarks.published_models import Experts, WideResNet, places
from benchmarks.published_settings import SETTINGS, Setting

PARAMETERS = {"MoE-690M": 690e6, "MoE-10B": 10e9, "GPT-2.6B": 2.6e9, "WResNet-1B": 1e9, "WResNet-6.8B": 6.8e9}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_plan_uses_all_devices(setting: Setting) -> None:
    assert sum(devices for _, devices in setting.stages) == setting.gpus
    assert setting.batch % setting.micro_batches == 0


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_the_size_in_their_name(name: str) -> None:
    (setting,) = (setting for setting in SETTINGS if setting.name == name)
    with torch.device("meta"):
        model = setting.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.07)


def test_experts_take_the_two_best_as_far_as_they_have_room() -> None:
    torch.manual_seed(0)
    layer, x = Experts(4, 4), torch.randn(2, 8, 4)
    gates = torch.softmax(layer.gate(x), -1)
    room = {(sample, expert): 4 for sample in range(2) for expert in range(4)}
    chosen: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
    best = gates.topk(2).indices
    for choice in range(2):
        for sample in range(2):
            for token in range(8):
                expert = int(best[sample, token, choice])
                if room[sample, expert]:
                    room[sample, expert] -= 1
                    chosen.setdefault((sample, token), {})[expert] = gates[sample, token, expert]
    wanted = torch.zeros_like(x)
    for (sample, token), experts in chosen.items():
        for expert, gate in experts.items():
            hidden = torch.relu(x[sample, token] @ layer.up[expert])
            wanted[sample, token] += gate / sum(experts.values()) * (hidden @ layer.down[expert])
    assert min(room.values()) == 0, "some expert is full, or this shows nothing"
    torch.testing.assert_close(layer(x), wanted)


def test_no_two_tokens_share_a_place() -> None:
    found = places(torch.softmax(torch.randn(3, 16, 4), -1), 8)
    assert int((found != 0).sum(1).max()) == 1


def test_a_wide_residual_network_returns_a_loss() -> None:
    model = WideResNet(channels=32, widening=2, classes=5)
    assert model(torch.randn(2, 3, 32, 32), torch.tensor([1, 2])).shape == ()
