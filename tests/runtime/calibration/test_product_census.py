"""The products of a profile: what each sample computes is the operator that it names, and what it says it costs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.runtime.calibration.product_census import Sample, _convolutions, _products


@pytest.fixture(scope="module")
def samples() -> dict[str, list[Sample]]:
    """Products of matrices and convolutions, by name."""
    found: dict[str, list[Sample]] = {}
    for sample in (*_products(), *_convolutions()):
        found.setdefault(sample.name, []).append(sample)
    return found


@pytest.mark.parametrize("name", ["mm", "bmm", "convolution", "convolution_backward"])
def test_a_sample_makes_as_many_flops_as_it_says(name: str, samples: dict[str, list[Sample]]) -> None:
    for sample in samples[name][:3]:
        with FlopCounterMode(display=False) as counter:
            sample.call()
        assert counter.get_total_flops() == sample.calls * sample.work


def test_a_convolution_is_no_transposed_one(samples: dict[str, list[Sample]]) -> None:
    call = samples["convolution"][0].call
    x, weight = call.args[:2]  # type: ignore[attr-defined]
    torch.testing.assert_close(call(), torch.nn.functional.conv2d(x, weight, padding=1))


@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_products_are_measured_down_to_a_tenth_of_a_megaflop(name: str, samples: dict[str, list[Sample]]) -> None:
    """Below its smallest sample a curve is flat, so those of small models must lie above it."""
    assert min(sample.work for sample in samples[name]) < 1e5
