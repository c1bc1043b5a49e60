"""Mixtures of the benchmark: read as products of experts, loaded as they should be."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture
from benchmarks.expert_parallelism.model import decoder, loads, settle, wanted_loads
from benchmarks.plan_quality.models import Chain

EXPERTS, CHOSEN = 8, 2
TOKENS = torch.randint(0, 64, (16, 32), generator=torch.Generator().manual_seed(1))


def small() -> Chain:
    torch.manual_seed(0)
    return decoder(layers=2, width=16, hidden=24, heads=2, experts=EXPERTS, chosen=CHOSEN, vocabulary=64)


def test_experts_are_one_product_a_matrix() -> None:
    """Read otherwise, every expert computes all rows."""
    program = capture(small(), (), {"x": TOKENS[:2], "labels": TOKENS[:2]})
    products = program.graph.find_nodes(op="call_function", target=torch.ops.autopar.expert_linear.default)
    assert sum(node.meta["phase"] == "forward" for node in products) == 3 * 2


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_experts_have_the_loads_that_they_should_have(exponent: float) -> None:
    model, wanted = small(), wanted_loads(EXPERTS, exponent)
    assert (loads(model, TOKENS) / wanted - 1.0).abs().max() > 0.2
    settle(model, TOKENS, exponent)
    assert (loads(model, TOKENS) / wanted - 1.0).abs().max() < 0.03


def test_zipf_has_the_loads_of_ranks() -> None:
    found = sorted(wanted_loads(4, 1.0).tolist(), reverse=True)
    assert [found[0] / each for each in found] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert sum(found) == pytest.approx(1.0)
