"""Settings build the same balanced model whoever asks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.expert_parallelism.model import expert_layers, wanted_loads
from benchmarks.expert_parallelism.settings import SETTINGS, SIZES_OF, Sizes, measured_loads, setting

SMALL = Sizes(batch=8, length=64, layers=2, width=16, heads=2, hidden=24, experts=4, chosen=2)


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_the_batch_of_a_setting_loads_its_experts_as_asked(exponent: float) -> None:
    sizes = replace(SMALL, exponent=exponent)
    wanted = wanted_loads(sizes.experts, exponent)
    assert (torch.tensor(measured_loads(sizes)) / wanted - 1.0).abs().max() < 0.03


def test_models_of_a_setting_are_equal() -> None:
    one, other = (setting(SMALL, "flat-1gbit").model_and_inputs() for _ in range(2))
    pairs = zip(one[0].state_dict().values(), other[0].state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(layer.bias.any() for layer in expert_layers(one[0]))
    assert all(torch.equal(one[1][name], other[1][name]) for name in ("x", "labels"))


def test_settings_are_all_experts_loads_and_links() -> None:
    assert len(SETTINGS) == 16
    assert set(SETTINGS) == set(SIZES_OF)
    assert {(sizes.experts, sizes.exponent) for sizes in SIZES_OF.values()} == {(4, 0), (4, 1), (32, 0), (32, 1)}
    assert {each.preset for each in SETTINGS.values()} == {
        "flat-1gbit", "flat-200mbit", "two-by-two", "two-by-two-1gbit",
    }  # fmt: skip
