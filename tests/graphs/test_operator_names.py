"""Names under which profiles measure operators."""

from __future__ import annotations

import pytest
import torch

from autopar import ops
from autopar.graphs.operator_names import curve_name
from autopar.ops import ring_attention
from autopar.runtime.calibration.product_census import products

ATTENTION = {
    name: getattr(module, name) for module in (ops, ring_attention) for name in module.__all__ if "attention" in name
}


@pytest.mark.parametrize("name", ATTENTION)
def test_whatever_computes_attention_has_the_curve_of_attention(name: str) -> None:
    measured = {sample.name for sample in products()}
    found = curve_name(getattr(ATTENTION[name], "_opoverload", ATTENTION[name]))
    assert found in measured
    assert ("backward" in found, "mask" in found) == ("backward" in name, "mask" in name)


def test_products_of_experts_in_order_have_the_curve_of_all() -> None:
    assert curve_name(torch.ops.autopar.sorted_expert_linear.default) == "expert_linear"
