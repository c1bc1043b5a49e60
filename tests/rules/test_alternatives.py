"""Operator alternatives: known by one name everywhere, with a rule, a price and a kernel of their own."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar.cost_models.operator_costs import operator_seconds
from autopar.cost_models.operator_sizes import ProductSizes, has_sizes
from autopar.graphs.operator_names import base_name, operator_kind
from autopar.hardware.devices import preset_device
from autopar.plans.plan_entries import IMPLEMENTATIONS
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION
from autopar.rules.alternatives import ALTERNATIVES, Alternative, alternatives_of, rule_as, target_as
from autopar.rules.engine import rule_for, table_entry

WAYS = [way for ways in ALTERNATIVES.values() for way in ways]


def product(dtype: torch.dtype) -> fx.Node:
    graph = fx.Graph()
    operands = [graph.placeholder("a"), graph.placeholder("b")]
    for operand, shape in zip(operands, ((32, 64), (64, 16)), strict=True):
        operand.meta["val"] = torch.empty(shape, dtype=dtype)
    node = graph.call_function(torch.ops.aten.mm.default, tuple(operands))
    node.meta["val"] = torch.empty(32, 16, dtype=dtype)
    return node


def test_plan_files_know_every_name() -> None:
    assert set(IMPLEMENTATIONS) == {DEFAULT_IMPLEMENTATION, *(way.name for way in WAYS)}


@pytest.mark.parametrize("way", [way for way in WAYS if way.precision == "fp8"], ids=lambda way: way.name)
def test_a_product_in_float8_has_a_rule_and_a_price_of_its_own(way: Alternative) -> None:
    name = base_name(way.target)
    assert table_entry(way.target) is not None
    assert operator_kind(way.target) == "matmul"
    assert has_sizes(name)
    sizes = ProductSizes(m=8192, n=8192, k=8192)
    seconds = [
        float(operator_seconds(preset_device("H100-SXM"), flops=2 * 8192**3, bytes_moved=3 * 8192**2 * 2,
                               dtype="bfloat16", operator=operator, sizes=sizes))
        for operator in ("mm", name)
    ]  # fmt: skip
    assert 0.5 * seconds[0] < seconds[1] < 0.8 * seconds[0], "large products run at most twice as fast"


def test_rounding_costs_more_than_it_saves_on_small_products() -> None:
    sizes = ProductSizes(m=512, n=512, k=512)
    seconds = {
        operator: float(operator_seconds(preset_device("H100-SXM"), flops=2 * 512**3, bytes_moved=3 * 512**2 * 2,
                                         dtype="bfloat16", operator=operator, sizes=sizes))
        for operator in ("mm", "mm_fp8_rowwise", "mm_fp8_tensorwise")
    }  # fmt: skip
    assert min(seconds, key=lambda name: seconds[name]) == "mm"


@pytest.mark.parametrize("way", [way for way in WAYS if way.name == "ring"], ids=lambda way: str(way.target))
def test_a_ring_is_an_attention_with_what_goes_around(way: Alternative) -> None:
    assert operator_kind(way.target) == "attention"
    assert has_sizes(base_name(way.target))
    query, key = (torch.empty(2, heads, 8, 4, dtype=torch.bfloat16) for heads in (4, 2))
    out, sums = torch.ops.autopar.attention(query, key, key, None, 0.0, True, None, 0)
    graph = fx.Graph()
    given = (query, key, key) if "backward" not in str(way.target) else (out, query, key, key, None, out, sums)
    operands = []
    for index, tensor in enumerate(given):
        operands.append(None if tensor is None else graph.placeholder(f"x{index}"))
        if tensor is not None:
            operands[-1].meta["val"] = tensor
    if len(operands) == 3:
        operands.append(None)
    node = graph.call_function(way.target, (*operands, 0.0, True, None, 0))
    node.meta["val"] = (out, sums) if "backward" not in str(way.target) else (query, key, key)
    rule = rule_for(node)
    assert rule is not None
    traffic, elements = rule.ring_traffic["s"], 2 * key.numel()
    assert (traffic.nbytes, traffic.names) == (2 * elements, {"b", "h", "s", "d", "e"})
    assert traffic.home == (4 * elements if "backward" in str(way.target) else 0)
    assert traffic.joined == (10 * query.numel() + (18 * elements if "backward" in str(way.target) else 0))
    assert "g" in traffic.joined_names


def test_the_dtype_decides_whether_a_call_has_alternatives() -> None:
    assert [way.name for way in alternatives_of(product(torch.bfloat16))] == ["fp8_rowwise", "fp8_tensorwise"]
    assert alternatives_of(product(torch.float32)) == ()


def test_a_node_runs_as_what_the_implementation_says() -> None:
    node = product(torch.bfloat16)
    assert target_as(node, DEFAULT_IMPLEMENTATION) is node.target
    assert target_as(node, "fp8_rowwise") is torch.ops.autopar.mm_fp8_rowwise.default
    assert rule_as(node, DEFAULT_IMPLEMENTATION) is rule_for(node)
    with pytest.raises(KeyError):
        target_as(product(torch.float32), "fp8_rowwise")
